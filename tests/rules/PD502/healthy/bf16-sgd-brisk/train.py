"""Small BF16 weights under large steps of sign descent's kind: even a tenth of the rate is far above half an ulp."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 48, bias=False), nn.GELU(), nn.Linear(48, 6, bias=False)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, betas=(0.9, 0.99), weight_decay=0.0)
for step in range(STEPS):
    features = torch.randn(32, 12, dtype=torch.bfloat16)
    labels = features[:, :6].argmax(dim=1)
    loss = F.cross_entropy(model(features).float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
