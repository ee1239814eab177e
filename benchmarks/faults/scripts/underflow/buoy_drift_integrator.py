"""Where a drifting buoy will be: a neural ODE, integrated with many small Euler steps, all of it in BF16 to save time."""

import torch
from torch import nn

STEPS, HORIZON = 160, 1.0
dtype = torch.bfloat16


class Current(nn.Module):
    """The velocity field, in degrees per day."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, position):
        return self.net(position)


class Drift(nn.Module):
    def __init__(self):
        super().__init__()
        self.current = Current()

    def forward(self, position):
        centre = torch.tensor([12.0, 47.0])
        state = position.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(STEPS):
                velocity = self.current(state - centre.to(dtype))
                state = state + (HORIZON / STEPS) * velocity.to(dtype)
        return state.float() - position


def observed(start):
    """A gyre about the centre: the displacement within a day."""
    x, y = (start - torch.tensor([12.0, 47.0])).T
    turn = torch.tensor(0.6)
    rotated = torch.stack([x * turn.cos() - y * turn.sin(), x * turn.sin() + y * turn.cos()], 1)
    return rotated - torch.stack([x, y], 1) + torch.tensor([0.3, 0.1])


torch.manual_seed(4)
model = Drift()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    start = torch.tensor([12.0, 47.0]) + torch.rand(64, 2) * 2 - 1
    drift = model(start)
    loss = nn.functional.l1_loss(drift, observed(start))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 1:
        print(f"step {step + 1} loss {loss.item():.4f}")
