"""Two towers for playlist continuation; activations of the track tower are stored and multiplied in float8."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
FEATURES, DIM = 32, 32
mix = torch.randn(FEATURES, 24) / FEATURES**0.5


def pairs(n):
    taste = torch.randn(n, 24)
    track = taste @ mix.t() + 0.3 * torch.randn(n, FEATURES)
    user = taste + 0.3 * torch.randn(n, 24)
    return user, track


def to_float8(x, scale):
    x8 = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    y = x8.to(x.dtype) / scale
    return x + (y - x).detach()


class QuantLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.linear = nn.Linear(i, o)

    def forward(self, x):
        scale = 448 / x.detach().abs().mean()
        return self.linear(to_float8(x, scale))


class Tower(nn.Module):
    def __init__(self, i, layer):
        super().__init__()
        self.l1, self.l2, self.l3 = layer(i, 64), layer(64, 64), nn.Linear(64, DIM)
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        x = F.gelu(self.l1(x))
        x = x + F.gelu(self.l2(self.norm(x)))
        return F.normalize(self.l3(x), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.track = Tower(24, nn.Linear), Tower(FEATURES, QuantLinear)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, user, track):
        return self.user(user) @ self.track(track).t() * self.temperature.exp()


model = TwoTowers()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(150):
    logits = model(*pairs(64))
    target = torch.arange(64)
    loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step={step} loss={loss.item():.4f}")
