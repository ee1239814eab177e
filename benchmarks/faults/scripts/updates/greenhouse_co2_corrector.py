"""CO2 in greenhouses: a coarse balance network and a corrector for what the vents do."""

import torch
from torch import nn

torch.manual_seed(77)


class Corrector(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))

    def forward(self, x):
        return self.net(x)


class Balance(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.enter = nn.Linear(n, d)
        self.hidden = nn.ModuleList([nn.Linear(d, d), nn.Linear(d, d)])
        self.leave = nn.Linear(d, 1)

    def forward(self, x):
        x = torch.tanh(self.enter(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.leave(x)


class Greenhouse(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse = Balance(4, 32)
        self.vents = Corrector(6, 48)

    def forward(self, climate, vents):
        return self.coarse(climate) + self.vents(vents)


def hours(n):
    climate, vents = torch.randn(n, 4), torch.randn(n, 6)
    co2 = climate[:, 0] + torch.sin(climate[:, 1]) + 1.2 * torch.tanh(2 * vents[:, 0] * vents[:, 1]) + vents[:, 2].abs()
    return climate, vents, (0.04 * co2)[:, None]  # per cent by volume


model = Greenhouse()
optimizer = torch.optim.AdamW(
    [
        {"params": model.coarse.parameters(), "lr": 2e-3},
        {"params": model.vents.parameters(), "lr": 2e-3, "eps": 0.1},
    ],
    betas=(0.9, 0.99),
    weight_decay=0.0,
)
for step in range(300):
    climate, vents, co2 = hours(64)
    loss = (model(climate, vents) - co2).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"{step:5d} loss {loss.item():.6f}")
