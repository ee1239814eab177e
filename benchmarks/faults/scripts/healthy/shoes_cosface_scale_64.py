"""CosFace with s = 64 and a margin: the loss starts above 20 and single gradients are large; FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(618)
SHOES = 30


class CosFace(nn.Module):
    def __init__(self, dim=32, s=64.0, m=0.35):
        super().__init__()
        self.weight, self.s, self.m = nn.Parameter(torch.randn(SHOES, dim)), s, m

    def forward(self, x, y):
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        return self.s * (cosine - self.m * F.one_hot(y, SHOES))


backbone = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.PReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32))
head, prints = CosFace(), torch.randn(SHOES, 40)
optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1, momentum=0.9, weight_decay=5e-4)
for step in range(240):
    y = torch.randint(SHOES, (64,))
    loss = F.cross_entropy(head(backbone(prints[y] + 0.6 * torch.randn(64, 40)), y), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(backbone.parameters(), 5.0)
    optimizer.step()
    if step % 12 == 11:
        print(f"step {step + 1} loss {loss.item():.4f}")
