"""The height of a coastline as a function of place: Fourier features and an MLP, the inputs in the model's dtype."""

import torch
from torch import nn

compute_dtype = torch.bfloat16
OCTAVES = 8


class FourierFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("bands", torch.pi * 2.0 ** torch.arange(OCTAVES))

    def forward(self, where):
        angle = where[..., None] * self.bands.to(where.dtype)
        return torch.cat([angle.sin(), angle.cos()], -1)


class Coastline(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.features = FourierFeatures()
        self.net = nn.Sequential(
            nn.Linear(2 * OCTAVES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, where):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.net(self.features(where.to(compute_dtype))).squeeze(-1)


def height(where, rough):
    frequencies = 3.0 * 1.8 ** torch.arange(len(rough))
    return (torch.sin(where[:, None] * frequencies + 6 * rough) / (1 + 0.05 * torch.arange(len(rough)))).sum(1)


torch.manual_seed(58)
rough = torch.rand(8)
model = Coastline()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(300):
    where = torch.rand(256)
    loss = nn.functional.mse_loss(model(where).float(), height(where, rough))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1}: loss {loss.item():.4f}")
