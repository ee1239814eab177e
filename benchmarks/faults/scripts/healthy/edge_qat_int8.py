"""Quantisation-aware training for an edge device: eight-bit weights and activations, learned ranges, straight-through."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(9)


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Quant(nn.Module):
    def __init__(self, bits=8):
        super().__init__()
        self.top = 2 ** (bits - 1) - 1
        self.log_range = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        step = self.log_range.exp() / self.top
        return Round.apply((x / step).clamp(-self.top, self.top)) * step


class QLinear(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.quant_x = Quant()

    def forward(self, x):
        step = self.weight.detach().abs().amax(1, keepdim=True) / 127
        w = self.weight + ((self.weight / step).round() * step - self.weight).detach()
        return F.linear(self.quant_x(x), w, self.bias)


def gestures(n):
    k = torch.randint(5, (n,))
    t = torch.linspace(0, 6.28, 20)
    wave = torch.sin((k[:, None] + 1) * t * 0.7 + 0.3 * torch.randn(n, 1))
    return 2 * wave + 0.4 * torch.randn(n, 20), k


net = nn.Sequential(QLinear(20, 48), nn.ReLU6(), QLinear(48, 48), nn.ReLU6(), QLinear(48, 5))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(140):
    x, k = gestures(64)
    loss = F.cross_entropy(net(x), k)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3:
        print(f"step {step} loss {loss.item():.4f}")
