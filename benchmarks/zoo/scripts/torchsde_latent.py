"""torchsde: a neural SDE fitted to the moments of a process.

library: torchsde
"""

import torch
import torchsde
from _digest import finish
from torch import nn

torch.manual_seed(0)


class Process(nn.Module):
    noise_type = "diagonal"
    sde_type = "ito"

    def __init__(self):
        super().__init__()
        self.drift = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.noise = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2), nn.Sigmoid())

    def f(self, t, y):
        return self.drift(y)

    def g(self, t, y):
        return self.noise(y)


model = Process()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
times = torch.linspace(0, 1, 6)
losses = []
for step in range(25):
    brownian = torchsde.BrownianInterval(0.0, 1.0, size=(64, 2), entropy=step)
    paths = torchsde.sdeint(model, torch.ones(64, 2), times, bm=brownian, dt=0.1, method="euler")
    loss = (paths.mean(1) - torch.exp(-times)[:, None]).square().mean() + (paths.std(1)[1:] - 0.3).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
