"""Pests in an orchard from weekly trap readings. The base stays as it is; adapters learn the new orchard."""

import argparse

import torch
import torch.nn.functional as F
from model import PestNet, freeze_base

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=3e-3)


def traps(n, g, signs):
    pest = torch.randint(0, 5, (n,), generator=g)
    week = torch.randint(0, 10, (n, 1, 1), generator=g)
    rise = torch.sigmoid(torch.arange(16)[None, :, None] - 3.0 - week)
    return rise * signs[pest][:, None] + 0.8 * torch.randn(n, 16, 10, generator=g), pest


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(141)
    g = torch.Generator().manual_seed(142)
    signs = torch.randn(5, 10, generator=g)
    model = PestNet()
    learnt = freeze_base(model)
    print(f"{sum(p.numel() for p in learnt)} of {sum(p.numel() for p in model.parameters())} weights learn")
    optimizer = torch.optim.AdamW(learnt, lr=args.lr, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps - 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, fall], [20])
    for step in range(args.steps):
        x, pest = traps(args.batch_size, g, signs)
        loss = F.cross_entropy(model(x), pest)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
        if step % 8 == 0:
            print(f"step {step} loss {loss.item():.4f}")
