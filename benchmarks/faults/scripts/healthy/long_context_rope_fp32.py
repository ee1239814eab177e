"""Relative offsets in windows that begin anywhere up to 60000; the angles stay in FP32 under BF16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(60000)
D, SHOWN = 32, 10


def windows(n):
    start = torch.randint(0, 60000, (n, 1))
    position = start + torch.randperm(20)[:SHOWN]
    gap = torch.randint(0, 6, (n,))
    position[:, -1] = position[:, 0] + 1 + gap
    token = torch.randint(2, 8, (n, SHOWN))
    token[:, 0], token[:, -1] = 0, 1
    return token, position, gap


class RopeScorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.q, self.k = nn.Embedding(8, D), nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("freq", 50.0 ** (-torch.arange(0, D, 2) / D), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(SHOWN, 64), nn.GELU(), nn.Linear(64, 6))

    def rotate(self, x, position):
        angle = position[..., None].float() * self.freq
        a, b = x.float().chunk(2, -1)
        c, s = angle.cos(), angle.sin()
        return torch.cat([a * c - b * s, a * s + b * c], -1).to(x.dtype)

    def forward(self, token, position):
        x = self.embed(token)
        q, k = self.rotate(self.q(x), position), self.rotate(self.k(x), position)
        return self.mlp((q[:, :1] @ k.transpose(1, 2)).squeeze(1) / D**0.5)


model = RopeScorer()
opt = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(250):
    token, position, gap = windows(128)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(token, position)
    loss = F.cross_entropy(logits.float(), gap)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
