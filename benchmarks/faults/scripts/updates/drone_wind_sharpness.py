"""Energy of drone flights; from the second phase on, the slope with respect to the wind encoder is recorded."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(314)
route_map, wind_map = torch.randn(8), torch.randn(2, 6)


def flights(n, phase):
    route, wind = torch.randn(n, 8), torch.randn(n, 6)
    u, v = (wind @ wind_map.T / 2).unbind(1)
    push = torch.sin(u) if phase == 1 else torch.sin(u) * torch.cos(2 * v)
    return route, wind, torch.tanh(route @ route_map / 3) + push


class Encoder(nn.Module):
    def __init__(self, n_in, d):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(n_in, d), nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x):
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class Energy(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.route, self.wind = Encoder(8, d), Encoder(6, d)
        self.mix = nn.ModuleList(nn.Linear(2 * d, 2 * d) for _ in range(2))
        self.out = nn.Linear(2 * d, 1)

    def forward(self, route, wind):
        x = torch.cat([self.route(route), self.wind(wind)], 1)
        for layer in self.mix:
            x = x + F.silu(layer(x))
        return self.out(x).squeeze(1)


model = Energy()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
slopes = []


def record_slope(module):
    slopes.append(sum(p.grad.square().sum() for p in module.parameters()).sqrt().item())
    module.zero_grad()


checkpoint = None
for step in range(600):
    phase = 1 if step < 220 else 2
    if phase == 2 and checkpoint is None:
        checkpoint = copy.deepcopy(model.state_dict())
    route, wind, energy = flights(96, phase)
    loss = F.mse_loss(model(route, wind), energy)
    optimizer.zero_grad()
    loss.backward()
    if phase == 2:
        record_slope(model.wind)
    optimizer.step()
    if step % 20 == 19:
        print(f"phase {phase} step {step} loss {loss.item():.4f}")
