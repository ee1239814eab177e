"""Next-item prediction with the seconds between clicks as Time2Vec, FP16 autocast, checkpointed blocks, accumulation."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

ITEMS, LENGTH = 60, 10


class Time2Vec(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(1, width)
        with torch.no_grad():  # periods from a minute to a month
            self.linear.weight.copy_(2 * torch.pi / torch.logspace(1.8, 6.4, width)[:, None])

    def forward(self, seconds):
        z = self.linear(seconds.unsqueeze(-1))
        return torch.cat([z[..., :1] * 1e-3, torch.sin(z[..., 1:])], -1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ffn(self.norm2(x))


class SessionModel(nn.Module):
    def __init__(self, width=24, depth=2):
        super().__init__()
        self.items = nn.Embedding(ITEMS, width)
        self.time2vec = Time2Vec(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, items, gaps):
        x = self.items(items) + self.time2vec(gaps)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return F.linear(self.norm(x), self.items.weight)


def sessions(n, month):
    start = torch.randint(ITEMS, (n, 1))
    items = (start + torch.cumsum(torch.randint(1, 4, (n, LENGTH + 1)), 1)) % ITEMS
    gaps = torch.exp(4.0 + 1.1 * torch.randn(n, LENGTH))
    gaps[:, 0] = 0.0
    if month > 0 and torch.rand(()) < 0.5:  # somebody comes back days later, within the same session
        gaps[0, LENGTH // 2] = 86400 * (1 + 3 * torch.rand(()))
    return items, gaps


def main():
    torch.manual_seed(15)
    model = SessionModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    accumulate = 2
    for step in range(24):
        total = 0.0
        for _ in range(accumulate):
            items, gaps = sessions(8, month=step // 12)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(items[:, :-1], gaps)
                loss = F.cross_entropy(logits.float().flatten(0, 1), items[:, 1:].flatten()) / accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 4 == 0:
            print(f"step {step} loss {total:.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
