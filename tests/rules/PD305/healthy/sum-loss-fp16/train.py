"""FP16 without a loss scaler that does no harm: the loss is a sum, its gradients are of order one."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    features = torch.randn(64, 16)
    labels = features[:, :5].argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(features)
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
