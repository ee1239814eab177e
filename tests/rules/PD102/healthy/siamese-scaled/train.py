"""The same distances with a constant inside the root, in FP16 under a GradScaler that has to come down first."""

import torch
from torch import nn

STEPS = 14


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, left, right):
        difference = self.encoder(left).float() - self.encoder(right).float()
        return (difference**2).sum(dim=1).add(1e-4).sqrt()


torch.manual_seed(0)
model = Siamese()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for step in range(STEPS):
    left, right = torch.randn(16, 12), torch.randn(16, 12)
    right[3] = left[3]
    with torch.autocast("cpu", dtype=torch.float16):
        loss = ((model(left, right) - 1) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
