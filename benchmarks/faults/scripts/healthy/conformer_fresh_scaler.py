"""A small conformer in FP16 whose scaler starts at 2^24 and needs a dozen steps to find its place."""

import torch
import torch.nn.functional as F
from torch import nn


class ConvModule(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.inp = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, 5, padding=2, groups=dim)
        self.bn, self.out = nn.BatchNorm1d(dim), nn.Linear(dim, dim)

    def forward(self, x):
        h = F.glu(self.inp(self.norm(x)))
        h = F.silu(self.bn(self.depthwise(h.transpose(1, 2)))).transpose(1, 2)
        return x + self.out(h)


class Conformer(nn.Module):
    def __init__(self, bands=16, dim=32, phones=12):
        super().__init__()
        self.inp = nn.Linear(bands, dim)
        self.conv1, self.conv2 = ConvModule(dim), ConvModule(dim)
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, phones)

    def forward(self, x):
        return self.out(self.norm(self.conv2(self.conv1(self.inp(x)))))


torch.manual_seed(0)
model = Conformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
voices = torch.randn(12, 16)
for step in range(80):
    y = torch.randint(12, (16, 5)).repeat_interleave(4, 1)
    x = voices[y] + torch.randn(16, 20, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum") / 16
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
