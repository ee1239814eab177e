"""Quantization-aware fine-tuning of a leaf-disease classifier: INT8 weights, straight-through gradients."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(17)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, scale):
        return torch.clamp(torch.round(w / scale), -127, 127).to(torch.int8).to(w.dtype) * scale

    @staticmethod
    def backward(ctx, g):
        return g, None


class QConv(nn.Conv2d):
    def weight_scale(self):
        return self.weight.detach().abs().amax() / 127

    def forward(self, x):
        return F.conv2d(x, RoundSTE.apply(self.weight, self.weight_scale()), self.bias, self.stride, self.padding)


class ConvBN(nn.Module):
    def __init__(self, a, b, stride=1):
        super().__init__()
        self.conv = QConv(a, b, 3, stride, 1)
        self.bn = nn.BatchNorm2d(b)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Leaf(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.features = nn.Sequential(
            ConvBN(3, 12), ConvBN(12, 16, 2), ConvBN(16, 16), ConvBN(16, 24, 2), ConvBN(24, 24), ConvBN(24, 24)
        )
        self.classifier = nn.Linear(24, classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def leaves(patterns, n):
    y = torch.randint(len(patterns), (n,))
    return patterns[y] + 2.2 * torch.randn(n, 3, 12, 12), y


def float_checkpoint():
    """The network as trained in floating point; exported weights carry per-channel gains of the old normalisation."""
    net = Leaf()
    with torch.no_grad():
        gains = torch.ones(24)
        gains[5], gains[17] = 900.0, 350.0
        net.features[4].conv.weight *= gains[:, None, None, None]
    return net


def finetune(net, patterns, steps):
    opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    for i in range(steps):
        x, y = leaves(patterns, 32)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 5 == 0:
            print(f"{i:>4} loss {loss.item():.4f}")


patterns = torch.randn(8, 3, 12, 12)
net = float_checkpoint()
finetune(net, patterns, 100)
