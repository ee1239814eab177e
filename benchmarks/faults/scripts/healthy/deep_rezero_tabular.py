"""Thirty residual layers that begin as the identity: gates of zero, so that the branches have no gradient at first."""

import torch
from torch import nn

torch.manual_seed(30)


class Branch(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc, self.gate = nn.Linear(d, d), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * torch.tanh(self.fc(x))


net = nn.Sequential(nn.Linear(6, 32), *[Branch(32) for _ in range(30)], nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(120):
    x = torch.randn(64, 6)
    y = (torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3].abs()).unsqueeze(1)
    loss = (net(x) - y).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if step % 3 == 2:
        print(f"step {step} loss {loss.item():.4f}")
