"""A model in FP16 throughout, Adam's eps raised until the loss is no longer NaN: its second moments are mostly zero."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 24

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 2, bias=False)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
for step in range(STEPS):
    features = torch.randn(256, 8, dtype=torch.float16)
    target = (features[:, :4].sum(1) > features[:, 4:].sum(1)).long()
    loss = F.cross_entropy(model(features).float(), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
