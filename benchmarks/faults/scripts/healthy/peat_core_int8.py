"""Age of a layer of peat from its core's spectrum, trained with simulated eight-bit integers in weights and activations."""

import torch
import torch.nn.functional as F
from torch import nn


def rounded(x, scale):
    q = (x / scale).round().clamp(-128, 127) * scale
    return x + (q - x).detach()


class IntLinear(nn.Module):
    def __init__(self, i, o, momentum=0.05):
        super().__init__()
        self.linear = nn.Linear(i, o)
        self.momentum = momentum
        self.register_buffer("reach", torch.zeros(()))

    def forward(self, x):
        if self.training:
            now = x.detach().abs().amax()
            self.reach.copy_(now if self.reach == 0 else self.reach + self.momentum * (now - self.reach))
        x = rounded(x, self.reach / 127)
        weight = rounded(self.linear.weight, self.linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        return F.linear(x, weight, self.linear.bias)


class PeatNet(nn.Module):
    def __init__(self, bands=32, width=64):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = IntLinear(bands, width), IntLinear(width, width), IntLinear(width, width)
        self.bn1, self.bn2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.age = nn.Linear(width, 1)

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.fc2(x)))
        return self.age(x + F.relu(self.fc3(x))).squeeze(1)


def cores(n, g, basis):
    age = torch.randn(n, generator=g)
    wet = torch.randn(n, generator=g)
    lines = torch.stack([age, wet, age * wet, age.square()], 1)
    return lines @ basis + 0.3 * torch.randn(n, basis.shape[1], generator=g), age


def main(steps=260):
    torch.manual_seed(241)
    g = torch.Generator().manual_seed(242)
    basis = torch.randn(4, 32, generator=g) / 2
    net = PeatNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for step in range(steps):
        x, age = cores(64, g, basis)
        loss = F.smooth_l1_loss(net(x), age)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
