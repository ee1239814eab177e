"""torchdiffeq: a neural ODE follows a spiral, gradients by the adjoint method.

library: torchdiffeq
"""

import torch
from _digest import finish
from torch import nn
from torchdiffeq import odeint, odeint_adjoint

torch.manual_seed(0)
true = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
times = torch.linspace(0, 10, 200)
with torch.no_grad():
    path = odeint(lambda _, y: (y**3) @ true, torch.tensor([[2.0, 0.0]]), times)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, _, y):
        return self.net(y**3)


model = Field()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
losses = []
for _ in range(40):
    start = torch.randint(0, 190, (16,))
    predicted = odeint_adjoint(model, path[start], times[:10], method="rk4")
    loss = (predicted - torch.stack([path[start + i] for i in range(10)])).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
