"""A wide network with small initial weights, whose weights are cast to E4M3 as they are."""

import torch
import torch.nn.functional as F
from torch import nn


def straight_through(x):
    """To E4M3 and back; the gradient passes."""
    return x + (x.to(torch.float8_e4m3fn).to(x.dtype) - x).detach()


class BareFloat8(nn.Module):
    def __init__(self, inputs, outputs, std):
        super().__init__()
        self.weight = nn.Parameter(std * torch.randn(outputs, inputs))

    def forward(self, x):
        return F.linear(x, straight_through(self.weight))


class WideNet(nn.Module):
    """Weights of some 4e-4, as in wide nets; a multiplier after each layer makes up for it."""

    def __init__(self, width=128, std=4e-4):
        super().__init__()
        self.embed = nn.Linear(10, width)
        self.hidden = nn.ModuleList(BareFloat8(width, width, std) for _ in range(3))
        self.multiplier = 0.1 / std
        self.readout = nn.Linear(width, 5)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.hidden:
            h = torch.tanh(self.multiplier * layer(h))
        return self.readout(h)


def clusters(n, centres):
    y = torch.randint(0, 5, (n,))
    x = centres[y, torch.randint(0, 4, (n,))] + 0.3 * torch.randn(n, 10)
    return x, y


def main(steps=60):
    torch.manual_seed(3121)
    centres = torch.randn(5, 4, 10)
    net = WideNet()
    optimizer = torch.optim.Adam(
        [
            {"params": [*net.embed.parameters(), *net.readout.parameters()], "lr": 2e-3},
            {"params": net.hidden.parameters(), "lr": 4e-6},
        ]
    )
    for step in range(steps):
        x, y = clusters(64, centres)
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"[{step + 1:2d}/{steps}] loss {loss.item():.4f}")


main()
