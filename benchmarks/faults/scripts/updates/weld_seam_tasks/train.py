"""Three predictions about a weld from one trunk, with projected gradients where the tasks disagree."""

import torch
from data import Welds
from model import SeamNet, task_losses
from pcgrad import PCGrad

CONFIG = dict(steps=300, batch=64, lr=1e-3, weight_decay=1e-4, log_every=10)

if __name__ == "__main__":
    torch.manual_seed(31)
    draw = Welds(seed=32)
    model = SeamNet()
    start = {k: v.detach().clone() for k, v in model.named_parameters()}
    adam = torch.optim.AdamW(model.parameters(), lr=CONFIG["lr"], weight_decay=CONFIG["weight_decay"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, CONFIG["steps"], eta_min=1e-5)
    optimizer = PCGrad(adam, model.trunk.parameters())
    for step in range(CONFIG["steps"]):
        x, *targets = draw(CONFIG["batch"])
        losses = task_losses(model(x), *targets)
        optimizer.backward(losses)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        if step % CONFIG["log_every"] == 0:
            each = " ".join(f"{value.item():.3f}" for value in losses)
            print(f"step {step} loss {sum(losses).item():.4f} ({each})")
