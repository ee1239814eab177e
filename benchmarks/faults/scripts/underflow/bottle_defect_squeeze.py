import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy, relu

torch.manual_seed(23)


def conv(i, o, s=1):
    return nn.Conv2d(i, o, 3, s, 1, bias=False)


class Inverted(nn.Module):
    """Expand, filter, squeeze; the squeezed features carry no activation."""

    def __init__(self, c, mid):
        super().__init__()
        self.expand = nn.Conv2d(c, mid, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(mid, momentum=0.1)
        self.depthwise = nn.Conv2d(mid, mid, 3, padding=1, groups=mid, bias=False)
        self.bn2 = nn.BatchNorm2d(mid, momentum=0.1)
        self.squeeze = nn.Conv2d(mid, c, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(c, momentum=0.1)
        nn.init.normal_(self.squeeze.weight, std=0.002)

    def forward(self, x):
        y = relu(self.bn1(self.expand(x)))
        y = relu(self.bn2(self.depthwise(y)))
        return x + self.bn3(self.squeeze(y))


class Gauge(nn.Module):
    """Reads the fill level: a weak signal of the dark-field camera."""

    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(1, c, 5, 2, 2, bias=False)
        self.bn = nn.BatchNorm2d(c, 0.1)

    def forward(self, dark):
        return self.bn(self.conv(dark))


class Inspector(nn.Module):
    def __init__(self, c=16, classes=6):
        super().__init__()
        self.stem = nn.Sequential(conv(1, c, 2), nn.BatchNorm2d(c, momentum=0.1), nn.ReLU())
        self.block1 = Inverted(c, 32)
        self.gauge = Gauge(c)
        self.block2 = Inverted(c, 32)
        self.last = nn.Linear(c, classes)

    def forward(self, bright, dark):
        x = self.block1(self.stem(bright))
        x = self.block2(x + self.gauge(dark))
        return self.last(x.mean((2, 3)))


defect = torch.randn(2, 1, 16, 16)
level = torch.randn(3, 1, 16, 16)


def bottles(n):
    d, f = torch.randint(2, (n,)), torch.randint(3, (n,))
    bright = defect[d] + 0.5 * torch.randn(n, 1, 16, 16)
    dark = 0.01 * (level[f] + 0.5 * torch.randn(n, 1, 16, 16))
    return bright, dark, d * 3 + f


net = Inspector()
opt = optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
for i in range(110):
    bright, dark, y = bottles(32)
    loss = cross_entropy(net(bright, dark), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 5 == 0:
        print(f"{i:4d}: loss {loss.item():.4f}")
