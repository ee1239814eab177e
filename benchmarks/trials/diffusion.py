"""A denoising diffusion model of points on a spiral: an MLP with residual blocks that is told the noise level."""

import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
WIDTH, LEVELS = 64, 50


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.points, self.level = nn.Linear(2, WIDTH), nn.Linear(16, WIDTH)
        self.blocks = nn.Sequential(Residual(), Residual())
        self.norm, self.noise = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x, level):
        waves = level.unsqueeze(1) * torch.exp(-math.log(100.0) * torch.arange(8) / 8)
        x = self.points(x) + self.level(torch.cat([waves.sin(), waves.cos()], dim=1))
        return self.noise(self.norm(self.blocks(x)))


model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
kept = torch.cumprod(1.0 - torch.linspace(1e-4, 0.1, LEVELS), dim=0)
for _step in range(60):
    angle = 9.0 * torch.rand(128).sqrt()
    data = torch.stack([angle.cos(), angle.sin()], dim=1) * angle.unsqueeze(1) / 5.0
    level, noise = torch.randint(LEVELS, (128,)), torch.randn(128, 2)
    share = kept[level].unsqueeze(1)
    loss = F.mse_loss(model(share.sqrt() * data + (1.0 - share).sqrt() * noise, level.float()), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
