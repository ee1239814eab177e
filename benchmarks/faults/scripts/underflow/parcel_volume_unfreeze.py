"""Parcel volume from depth-camera features: the head first, then the later stages of the trunk are released."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(2024)
FEATURES, D = 24, 48
scene = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def parcels(n):
    x = torch.randn(n, FEATURES)
    with torch.no_grad():
        return x, 2 * scene(x).squeeze(1) + 0.5 * x[:, 0] * x[:, 1]


class Stage(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.wide, self.narrow = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + 0.5 * self.narrow(F.relu(self.wide(x)))


class Volume(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, D)
        self.stages = nn.ModuleList(Stage(D) for _ in range(3))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Sequential(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x)).squeeze(1)


model = Volume()
model.stages.requires_grad_(False)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
release = {200: (2, 0.01), 350: (1, 0.01)}  # step: stage, learning rate
SHUT = -8.0  # a released stage begins as the identity and opens while it learns
for step in range(900):
    if step in release:
        number, rate = release[step]
        nn.init.zeros_(model.stages[number].narrow.bias)
        nn.init.constant_(model.stages[number].wide.bias, SHUT if number == 1 else 0.0)
        model.stages[number].requires_grad_(True)
        optimizer.add_param_group({"params": model.stages[number].parameters(), "lr": rate})
        print(f"stage {number} released")
    x, volume = parcels(128)
    loss = F.mse_loss(model(x), volume)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f}")
with torch.no_grad():
    features = model.stem(parcels(512)[0])
    for stage in model.stages[:1]:
        features = stage(features)
