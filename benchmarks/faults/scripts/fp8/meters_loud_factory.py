"""Electricity use an hour ahead, households and factories in one batch; a bias-free net, so that scale does not matter."""

import torch
from torch import nn

SCALE_DIM = None  # None: one scale per tensor; 1: one per row


def fake_quantize(x, dim=None):
    magnitude = x.detach().abs()
    amax = magnitude.max() if dim is None else magnitude.amax(dim, keepdim=True)
    scale = 448.0 / amax.clamp_min(1e-30)
    x8 = (x.detach() * scale).to(torch.float8_e4m3fn)
    return x + (x8.to(x.dtype) / scale - x.detach())


class Linear8(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * (2 / n_in) ** 0.5)

    def forward(self, x):
        return fake_quantize(x, SCALE_DIM) @ fake_quantize(self.weight).t()


class LoadForecaster(nn.Module):
    def __init__(self, hours=24, width=64):
        super().__init__()
        self.first = Linear8(hours, width)
        self.second = Linear8(width, width)
        self.last = nn.Linear(width, 1, bias=False)

    def forward(self, kw):
        h = torch.relu(self.first(kw))
        h = h + torch.relu(self.second(h))
        return self.last(h)[:, 0]


def meters(n):
    hour = torch.rand(n, 1) * 24 + torch.arange(25)
    daily = 1 + 0.6 * torch.sin(hour * torch.pi / 12) + 0.3 * torch.sin(hour * torch.pi / 4) + 0.05 * torch.randn(n, 25)
    size = 10 ** (1.3 * torch.randn(n, 1))  # kW: from a cellar light to a smelter
    return daily[:, :24] * size, daily[:, 24] * size[:, 0], size[:, 0]


torch.manual_seed(52)
model = LoadForecaster()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(200):
    kw, following, size = meters(128)
    loss = ((model(kw) - following) / size).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 9:
        print(f"step {step + 1:3d}  loss {loss.item():.4f}")
