"""Poisson-Boltzmann equation u'' = sinh(u) between two plates, collocation with torch.func; the plate's potential is swept."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap


class Potential(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )

    def forward(self, x, plate):
        inner = self.net(torch.stack([x, torch.log1p(plate)], -1)).squeeze(-1)
        # boundary values are built in: u(0) = plate, u(1) = 0
        return plate * (1 - x) + x * (1 - x) * inner


def u(params, x, plate):
    return functional_call(model, params, (x, plate))


def residual(params, x, plate):
    curvature = grad(grad(u, argnums=1), argnums=1)(params, x, plate)
    return curvature - torch.sinh(u(params, x, plate))


def huber(r, delta=1.0):
    a = r.abs()
    return torch.where(a < delta, 0.5 * r * r, delta * (a - 0.5 * delta)).mean()


torch.manual_seed(2)
model = Potential()
params = dict(model.named_parameters())
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
# in units of kT/e; the last one came from another table, in millivolts
sweep = [0.5, 1.0, 2.0, 4.0, 102.7]
for step in range(25):
    plate = torch.tensor(sweep[step // 5])
    x = torch.rand(64)
    r = vmap(residual, in_dims=(None, 0, None))(params, x, plate)
    loss = huber(r)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"plate {plate.item():6.1f}  loss {loss.item():.4e}")
