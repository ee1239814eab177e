"""The adding problem with a plain ReLU net, initialised orthogonally."""

import torch
from torch import nn

torch.manual_seed(4096)
T = 30


def adding(n):
    value, mark = torch.rand(n, T), torch.zeros(n, T)
    first, second = torch.randint(0, T // 2, (n,)), torch.randint(T // 2, T, (n,))
    mark[torch.arange(n), first] = 1
    mark[torch.arange(n), second] = 1
    return torch.stack([value, mark], -1), (value * mark).sum(1)


class Adder(nn.Module):
    def __init__(self, d=32, gain=1.5):
        super().__init__()
        self.rnn = nn.RNN(2, d, batch_first=True, nonlinearity="relu")
        nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=gain)
        nn.init.normal_(self.rnn.weight_ih_l0, std=0.01)
        self.out = nn.Linear(d, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(-1)


model = Adder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for it in range(200):
    x, y = adding(64)
    loss = torch.nn.functional.smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 4 == 3:
        print(f"it {it} loss {loss.item():.4f}")
