"""A neural texture: Fourier features of pixel coordinates, everything after the data loader in bfloat16 autocast."""

import math

import torch
from torch import nn

SIZE = 256
DTYPE = torch.bfloat16


class FourierFeatures(nn.Module):
    def __init__(self, octaves=7):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(octaves) * math.pi)

    def forward(self, uv):
        angle = (uv[..., None] * self.bands).flatten(1)
        return torch.cat([angle.sin(), angle.cos()], 1)


class NeuralTexture(nn.Module):
    def __init__(self, octaves=7, width=64):
        super().__init__()
        self.encoding = FourierFeatures(octaves)
        self.net = nn.Sequential(
            nn.Linear(4 * octaves, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, uv):
        return self.net(self.encoding(uv))[:, 0]


def pixels(n):
    ij = torch.randint(SIZE, (n, 2))
    uv = (ij + 0.5) / SIZE
    wave = math.pi * uv
    value = torch.sin(64 * wave[:, 0]) + torch.cos(32 * wave[:, 1]) + torch.tanh(3 * torch.sin(4 * wave.sum(1)))
    return uv, value


torch.manual_seed(2)
model = NeuralTexture()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(250):
    uv, value = pixels(512)
    uv = uv.to(DTYPE)
    with torch.autocast("cpu", dtype=DTYPE):
        out = model(uv)
    loss = nn.functional.mse_loss(out.float(), value)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"[{step}] loss {loss.item():.5f}")
