"""Diffusion with the preconditioning of Karras et al., BF16 autocast: noise from 0.002 to 80, loss weights of 250 000."""

import torch
import torch.nn.functional as F
from torch import nn

SIGMA_DATA = 0.5


class Net(nn.Module):
    def __init__(self, d=96):
        super().__init__()
        self.noise = nn.Linear(16, d)
        self.inp = nn.Linear(8, d)
        self.mid = nn.ModuleList([nn.Linear(d, d) for _ in range(2)])
        self.out = nn.Linear(d, 8)
        self.register_buffer("freqs", torch.arange(1, 9).float())

    def forward(self, x, c_noise):
        angle = c_noise * self.freqs
        emb = self.noise(torch.cat([angle.cos(), angle.sin()], -1))
        h = self.inp(x)
        for layer in self.mid:
            h = h + F.silu(layer(F.silu(h + emb)))
        return self.out(h)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, y, sigma):
        total = sigma.square() + SIGMA_DATA**2
        c_skip, c_out = SIGMA_DATA**2 / total, sigma * SIGMA_DATA / total.sqrt()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            f = self.net(y / total.sqrt(), sigma.log() / 4)
        return c_skip * y + c_out * f.float()


torch.manual_seed(428)
model = Denoiser()
shape = torch.randn(6, 8)
shape = SIGMA_DATA * shape / shape.std()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
for step in range(100):
    x = shape[torch.randint(6, (128,))] + 0.05 * torch.randn(128, 8)
    sigma = torch.exp(torch.empty(128, 1).uniform_(-6.2, 4.38))
    weight = (sigma.square() + SIGMA_DATA**2) / (sigma * SIGMA_DATA).square()
    loss = (weight * (model(x + sigma * torch.randn_like(x), sigma) - x).square()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
