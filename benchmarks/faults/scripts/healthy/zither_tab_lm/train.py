"""Zither tablature as a language: a tiny model with tied embeddings, bfloat16 autocast, three micro-batches to a step."""

import argparse

import torch
import torch.nn.functional as F
from model import TabLM

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--micro-batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=3)
parser.add_argument("--lr", type=float, default=3e-3)


def tunes(n, g, follow):
    tokens = torch.randint(0, 40, (n, 33), generator=g)
    for t in range(2, 33):
        known = torch.rand(n, generator=g) < 0.85
        tokens[:, t] = torch.where(known, follow[tokens[:, t - 1], tokens[:, t - 2] % 2], tokens[:, t])
    return tokens


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(221)
    g = torch.Generator().manual_seed(222)
    follow = torch.randint(0, 40, (40, 2), generator=g)
    model = TabLM()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.15)
    for step in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        shown = 0.0
        for _ in range(args.accumulate):
            tokens = tunes(args.micro_batch, g, follow)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate
            loss.backward()
            shown += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 4 == 0:
            print(f"step {step} loss {shown:.4f}")
