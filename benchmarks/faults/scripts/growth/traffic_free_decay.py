"""Traffic counts with diagonal state-space layers. The decay of each state is a free parameter, drawn around one."""

import torch
from torch import nn


class DiagonalSSM(nn.Module):
    def __init__(self, dim, states=16):
        super().__init__()
        self.a = nn.Parameter(1.0 + 0.05 * torch.randn(states))
        self.b = nn.Linear(dim, states, bias=False)
        self.c = nn.Linear(states, dim)

    def forward(self, u):
        decay = self.a
        drive, state, out = self.b(u), 0.0, []
        for t in range(u.shape[1]):
            state = decay * state + drive[:, t]
            out.append(state)
        return self.c(torch.stack(out, 1))


class Counts(nn.Module):
    def __init__(self, dim=16, layers=2):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.layers = nn.ModuleList([DiagonalSSM(dim) for _ in range(layers)])
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(torch.tanh(x))
        return self.out(x)[..., 0]


def days(n, length=96):
    t = torch.arange(length) / 24.0 + torch.rand(n, 1)
    rush = torch.sin(6.2832 * t) + 0.5 * torch.sin(12.566 * t)
    weather = torch.zeros(n, length)
    for i in range(1, length):
        weather[:, i] = 0.9 * weather[:, i - 1] + 0.3 * torch.randn(n)
    count = rush + weather
    x = torch.stack([count[:, :-1] + 0.2 * torch.randn(n, length - 1), rush[:, 1:]], -1)
    return x, count[:, 1:]


if __name__ == "__main__":
    torch.manual_seed(26)
    model = Counts()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(80):
        x, y = days(16)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")
