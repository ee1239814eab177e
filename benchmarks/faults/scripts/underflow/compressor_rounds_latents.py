"""Learned image compression: latents are quantised with round() in training, too."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Compressor(nn.Module):
    def __init__(self, n=16, m=4):
        super().__init__()
        self.analysis = nn.Sequential(
            nn.Conv2d(1, n, 5, 2, 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(n, n, 5, 2, 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(n, m, 3, 1, 1),
        )
        self.synthesis = nn.Sequential(
            nn.Conv2d(m, n, 3, 1, 1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(n, n, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(n, 1, 4, 2, 1),
        )
        self.log_scale = nn.Parameter(torch.zeros(1, m, 1, 1))

    def quantize(self, y):
        return torch.round(y)

    def forward(self, x):
        y = 8 * self.analysis(x)
        y_hat = self.quantize(y)
        rate = (y_hat.abs() / self.log_scale.exp() + self.log_scale).mean()
        return self.synthesis(y_hat / 8), rate


def textures(n, size=24):
    grid = torch.linspace(0, 1, size)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    k, p = 6 + 14 * torch.rand(n, 2, 1, 1), 6.28 * torch.rand(n, 1, 1)
    return torch.sin(k[:, 0] * xx + k[:, 1] * yy + p).unsqueeze(1)


torch.manual_seed(2115)
model = Compressor()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
lmbda = 0.001
for step in range(200):
    x = textures(16)
    x_hat, rate = model(x)
    loss = F.mse_loss(x_hat, x) + lmbda * rate
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
