"""Smart-meter forecasting with a recurrent network whose state is carried from window to window."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class IdentityRNN(nn.Module):
    """Le, Jaitly and Hinton's ReLU network that starts from the identity."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.i2h, self.h2h = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden, bias=False)
        nn.init.eye_(self.h2h.weight)
        nn.init.normal_(self.i2h.weight, std=0.03)
        nn.init.zeros_(self.i2h.bias)

    def forward(self, x, h):
        out = []
        for t in range(x.shape[1]):
            h = F.relu(self.i2h(x[:, t]) + self.h2h(h))
            out.append(h)
        return torch.stack(out, 1), h


class MeterNet(nn.Module):
    def __init__(self, inputs=4, hidden=32):
        super().__init__()
        self.rnn = IdentityRNN(inputs, hidden)
        self.load = nn.Linear(hidden, 1)

    def forward(self, x, h):
        states, h = self.rnn(x, h)
        return self.load(states).squeeze(-1), h


class Meters:
    """An endless stream for each of sixteen houses."""

    def __init__(self, houses=16):
        self.time = torch.randint(1000, (houses, 1))
        self.habit = 1 + torch.rand(houses, 1)

    def window(self, length=16):
        t = self.time + torch.arange(length + 1)
        self.time = self.time + length
        load = self.habit + torch.sin(0.26 * t) + 0.5 * torch.sin(0.037 * t) + 0.1 * torch.randn(t.shape)
        day = torch.stack([torch.sin(0.26 * t), torch.cos(0.26 * t), torch.ones(t.shape)], -1)
        return torch.cat([load[:, :-1, None], day[:, :-1]], -1), load[:, 1:]


torch.manual_seed(181)
meters, net = Meters(), MeterNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
h = torch.zeros(16, 32)
for step in range(200):
    x, y = meters.window()
    predicted, h = net(x, h.detach())
    loss = F.smooth_l1_loss(predicted, y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
