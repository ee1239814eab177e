"""Images relit by a small network in linear light, and compared in sRGB."""

import torch
import torch.nn.functional as F
from torch import nn


def linear_to_srgb(x):
    return torch.where(x <= 0.0031308, 12.92 * x, 1.055 * x.pow(1 / 2.4) - 0.055)


class SirenLayer(nn.Module):
    def __init__(self, d_in, d_out, first=False):
        super().__init__()
        self.lin = nn.Linear(d_in, d_out)
        bound = 1 / d_in if first else (6 / d_in) ** 0.5 / 10
        nn.init.uniform_(self.lin.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(10 * self.lin(x))


class Relight(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(SirenLayer(4, width, first=True), SirenLayer(width, width))
        self.albedo = nn.Linear(width, 3)
        nn.init.constant_(self.albedo.bias, 0.6)
        nn.init.normal_(self.albedo.weight, std=0.02)

    def forward(self, uv, sun):
        return self.albedo(self.body(torch.cat([uv, sun], -1)))


class Experiment:
    def __init__(self, steps=40):
        self.steps = steps
        self.net = Relight()
        self.opt = torch.optim.Adam(self.net.parameters(), lr=2e-3)

    def pixels(self, n=256):
        uv, sun = torch.rand(n, 2) * 2 - 1, torch.rand(n, 2) * 2 - 1
        shade = (0.5 + 0.5 * (uv * sun).sum(-1, keepdim=True)).clamp(0, 1)
        colour = torch.cat([0.5 + 0.5 * uv, 1 - uv[:, :1].abs()], -1).clamp(0.02, 1)
        return uv, sun, (shade * colour).clamp(min=1e-3)

    def loss(self, batch):
        uv, sun, light = batch
        return F.l1_loss(linear_to_srgb(self.net(uv, sun)), linear_to_srgb(light))

    def run(self):
        for step in range(self.steps):
            loss = self.loss(self.pixels())
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if step % 8 == 0:
                print(f"step {step}: {loss.item():.4f}")


torch.manual_seed(52)
Experiment().run()
