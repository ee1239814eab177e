"""The state of a beehive from its hum and its climate; two towers, fused late."""

import torch
import torch.nn.functional as F
from data import hives
from model import HiveState, init_weights


def build(seed=61):
    torch.manual_seed(seed)
    model = HiveState()
    model.audio.apply(init_weights)
    groups = [
        {"params": model.audio.parameters(), "lr": 0.1},
        {"params": model.climate.parameters(), "lr": 0.05},
        {"params": [*model.fuse.parameters(), *model.out.parameters()], "lr": 0.05},
    ]
    return model, torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-4)


def main(steps=240):
    model, optimizer = build()
    g = torch.Generator().manual_seed(62)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        mel, climate, state = hives(32, g)
        loss = F.cross_entropy(model(mel, climate), state)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        schedule.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    model = main()
