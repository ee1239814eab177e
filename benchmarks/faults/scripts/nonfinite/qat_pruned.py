"""Quantisation-aware training of a CNN: fake INT8 weights per channel, straight-through; channels are pruned half-way."""

import torch
from torch import nn
from torch.nn import functional as F


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def fake_quantise(weight, bits=8):
    top = 2 ** (bits - 1) - 1
    inverse_scale = top / weight.detach().abs().amax(dim=(1, 2, 3), keepdim=True)
    return StraightThrough.apply(weight * inverse_scale).clamp(-top, top) / inverse_scale


class QConv2d(nn.Conv2d):
    quantise = True

    def forward(self, x):
        weight = fake_quantise(self.weight) if self.quantise else self.weight
        return self._conv_forward(x, weight, self.bias)


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.features = nn.Sequential(
            QConv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.MaxPool2d(2),
            QConv2d(12, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
        )
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.features(x).mean((2, 3)))


@torch.no_grad()
def prune_channels(conv, share):
    """Zero the output channels with the smallest L1 norm."""
    size = conv.weight.abs().sum(dim=(1, 2, 3))
    conv.weight[size.argsort()[: int(share * len(size))]] = 0


def stripes(n, generator):
    label = torch.randint(4, (n,), generator=generator)
    row, column = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    angle = label[:, None, None] * torch.pi / 4
    image = torch.sin(row * angle.cos() + column * angle.sin())
    return (image + 0.4 * torch.randn(n, 12, 12, generator=generator)).unsqueeze(1), label


def main():
    torch.manual_seed(6)
    generator = torch.Generator().manual_seed(6)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for step in range(26):
        if step == 12:
            prune_channels(net.features[4], 0.25)
        x, y = stripes(24, generator)
        loss = F.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
