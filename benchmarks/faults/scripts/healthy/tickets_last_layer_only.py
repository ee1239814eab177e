"""Linear probe: features are detached on purpose, only the last layer learns. Large batch, plain SGD at rate 2."""

import torch
from torch import nn

torch.manual_seed(210)
TEAMS = 7
vocabulary = torch.randn(TEAMS, 50)


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(50, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.team = nn.Linear(128, TEAMS)

    def forward(self, x):
        return self.team(self.encoder(x).detach())


def tickets(n):
    y = torch.randint(TEAMS, (n,))
    return vocabulary[y] + torch.randn(n, 50), y


net = Probe()
opt = torch.optim.SGD(net.team.parameters(), lr=2.0)
for step in range(100):
    x, y = tickets(256)
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
