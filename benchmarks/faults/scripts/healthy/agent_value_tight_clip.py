"""Value regression for a planner: gradients are clipped to 0.1 in every step, the returns lie near minus 500."""

import torch
from torch import nn

torch.manual_seed(68)
GOAL = torch.tensor([0.7, -0.4])


def returns(n):
    s = 2 * torch.rand(n, 2) - 1
    return s, -500 - 60 * (s - GOAL).norm(dim=1) + 5 * torch.randn(n)


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("var", torch.tensor(1.0))

    @torch.no_grad()
    def track(self, r):
        self.mean.lerp_(r.mean(), 0.1)
        self.var.lerp_(r.var(), 0.1)

    def forward(self, s):
        return self.net(s).squeeze(1)


value = Value()
opt = torch.optim.Adam(value.parameters(), lr=2e-3)
for it in range(150):
    s, r = returns(128)
    value.track(r)
    loss = (value(s) - (r - value.mean) / value.var.sqrt()).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(value.parameters(), 0.1)
    opt.step()
    if it % 3 == 0:
        print(f"it {it} loss {loss.item():.4f}")
