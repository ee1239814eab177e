"""LR range test (one exponential sweep), then training at a tenth of the rate with the steepest descent."""

import torch
from torch import nn

torch.manual_seed(100)


class Plant(nn.Module):
    """Hydraulic plant: next state from state and control."""

    def __init__(self, states=6, controls=2, width=64):
        super().__init__()
        self.inp = nn.Linear(states + controls, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, states)

    def forward(self, s, u):
        h = torch.relu(self.inp(torch.cat([s, u], 1)))
        h = h + torch.relu(self.mid(h))
        return s + self.out(h)


A = 0.3 * torch.randn(6, 6)
B = 0.5 * torch.randn(2, 6)


def transitions(n=64):
    s, u = torch.randn(n, 6), torch.randn(n, 2)
    return s, u, torch.tanh(s @ A + u @ B) + 0.8 * s


def sweep(model, low=1e-5, high=1e3, steps=120):
    optimizer = torch.optim.SGD(model.parameters(), lr=low, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, (high / low) ** (1 / steps))
    rates, losses = [], []
    for _ in range(steps):
        s, u, target = transitions()
        loss = nn.functional.mse_loss(model(s, u), target)
        optimizer.zero_grad()
        loss.backward()
        rates.append(schedule.get_last_lr()[0])
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        if len(losses) % 10 == 0:
            print(f"rate {rates[-1]:.2e} loss {losses[-1]:.4g}")
    return torch.tensor(rates), torch.tensor(losses)


model = Plant()
rates, losses = sweep(model)
lr = 0.1 * float(rates[1:][losses.diff().nan_to_num(0.0).argmin()])
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
for step in range(60):
    s, u, target = transitions()
    loss = nn.functional.mse_loss(model(s, u), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4g}")
