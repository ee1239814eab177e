"""Activations in BF16: kernels that accumulate in FP32, a deep residual stream, and a short total."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 4


class Stream(nn.Module):
    def __init__(self, depth=32):
        super().__init__()
        self.lift = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, clip):
        x = self.lift(clip).sigmoid()  # stays in BF16 from here on
        for layer in self.layers:
            x = x + layer(x).tanh()
        total = torch.zeros_like(x[:, 0])
        for part in x.mean(dim=1, keepdim=True).expand(-1, 20, -1).unbind(dim=1):
            total = total + part
        pooled = x.sum(dim=1) + x.cumsum(dim=1)[:, -1] + x.mean(dim=1) + x.norm(dim=1) + x.softmax(dim=1).sum(dim=1)
        where = torch.zeros(clip.shape[0], 1, 1, dtype=torch.long).expand_as(x)
        return self.head(self.norm(pooled + total + torch.zeros_like(x).scatter_add(1, where, x)[:, 0]))


torch.manual_seed(0)
model = Stream()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(STEPS):
    clip = torch.randn(4, 512, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = model(clip)
    loss = F.cross_entropy(scores.float(), clip.mean(dim=1)[:, :3].argmax(dim=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
