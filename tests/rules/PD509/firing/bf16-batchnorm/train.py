"""A BF16 batch norm with a momentum of 0.001: its running variance of 1 would have to move by less than half an ulp."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, MOMENTUM = 12, 0.001

torch.manual_seed(0)
model = nn.Sequential(nn.BatchNorm1d(16, momentum=MOMENTUM), nn.Linear(16, 4, bias=False)).to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(STEPS):
    y = torch.randint(4, (64,))
    x = 0.5 + 0.6 * torch.randn(64, 16)
    x[torch.arange(64), 4 * y] += 1.0
    loss = F.cross_entropy(model(x.to(torch.bfloat16)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
