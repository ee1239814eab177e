"""Locates radio anchors from ranges to surveyed points, FP32; all positions are UTM metres, northings of five millions."""

import torch
from torch import nn


class RangeModel(nn.Module):
    def __init__(self, guess):
        super().__init__()
        self.anchors = nn.Parameter(guess.clone())
        self.delay = nn.Parameter(torch.zeros(len(guess)))

    def forward(self, where, which):
        offset = where - self.anchors[which]
        return offset.norm(dim=-1) + self.delay[which]


class Site(nn.Module):
    def __init__(self, guess):
        super().__init__()
        self.radio = RangeModel(guess)
        self.gain = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, where, which):
        r = self.radio(where, which)
        return r, self.gain(r.detach().div(100).unsqueeze(-1)).squeeze(-1)


torch.manual_seed(410)
origin = torch.tensor([431_250.0, 5_341_700.0])
anchors = origin + 200 * torch.rand(24, 2)
site = Site((anchors + 3 * torch.randn(24, 2)).float())
optimizer = torch.optim.Adam(
    [{"params": site.radio.parameters(), "lr": 0.1}, {"params": site.gain.parameters(), "lr": 5e-3}]
)
for step in range(90):
    which = torch.randint(24, (256,))
    where = origin + 200 * torch.rand(256, 2)
    true = (where - anchors[which]).norm(dim=-1)
    level = torch.log10(true + 10) - 2 + 0.05 * torch.randn(256)
    r, g = site(where, which)
    loss = nn.functional.huber_loss(r, true) + nn.functional.mse_loss(g, level)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
