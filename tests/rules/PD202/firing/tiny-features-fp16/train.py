"""Features in metres where millimetres are meant: in FP16 their products with the gradient fall below what it holds."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(STEPS):
    features = torch.randn(64, 48) * 1e-6
    labels = torch.randint(4, (64,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(features)
    loss = 8 * F.cross_entropy(logits.float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
