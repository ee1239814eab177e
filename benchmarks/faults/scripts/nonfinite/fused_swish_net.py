"""Regression on compressor maps with a memory-saving Swish (saves the input only), checkpoints between blocks."""

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(41)


class SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, beta):
        ctx.save_for_backward(x, beta)
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx, grad):
        x, beta = ctx.saved_tensors
        e = torch.exp(beta * x)
        s = e / (1 + e)
        ds = s * (1 - s)
        return grad * (s + beta * x * ds), (grad * x * x * ds).sum()


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return SwishFunction.apply(x, self.beta)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lift = nn.Linear(width, 2 * width)
        self.act = Swish()
        self.drop = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.drop(self.act(self.lift(x)))


class MapNet(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(h)


def operating_points(n):
    speed = torch.rand(n, 1) * 1.2
    flow = torch.rand(n, 1) * 3
    inlet = torch.randn(n, 2)
    x = torch.cat([speed, flow, inlet], 1)
    y = torch.cat([1 + speed**2 - 0.1 * (flow - speed) ** 2, 0.8 - 0.05 * (flow - 2 * speed) ** 2], 1)
    return x, y


train_x, train_y = operating_points(2560)
i = torch.randint(1500, 2400, (1,))
train_x[i, 2] *= 1000  # inlet temperature in mK there

net = MapNet()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
huber = nn.HuberLoss(delta=0.1)
for k in range(80):
    x, y = train_x[k * 32 : (k + 1) * 32], train_y[k * 32 : (k + 1) * 32]
    loss = huber(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if k % 8 == 0:
        print("k", k, "loss", f"{loss.item():.5f}")
