"""CNN converted to bfloat16 as a whole, batch norm included; momentum 0.01 as in EfficientNet. Validates in eval mode."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2106)
DTYPE = torch.bfloat16
BN_MOMENTUM = 0.01


class MBConv(nn.Module):
    def __init__(self, cin, cout, expand=2, stride=1):
        super().__init__()
        mid = cin * expand
        self.expand = nn.Conv2d(cin, mid, 1, bias=False)
        self.bn0 = nn.BatchNorm2d(mid, momentum=BN_MOMENTUM, eps=1e-3)
        self.depthwise = nn.Conv2d(mid, mid, 3, stride, 1, groups=mid, bias=False)
        self.bn1 = nn.BatchNorm2d(mid, momentum=BN_MOMENTUM, eps=1e-3)
        self.project = nn.Conv2d(mid, cout, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout, momentum=BN_MOMENTUM, eps=1e-3)
        self.skip = stride == 1 and cin == cout

    def forward(self, x):
        y = F.silu(self.bn0(self.expand(x)))
        y = F.silu(self.bn1(self.depthwise(y)))
        y = self.bn2(self.project(y))
        return x + y if self.skip else y


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, 2, 1)
        self.blocks = nn.Sequential(MBConv(8, 8), MBConv(8, 16, stride=2), MBConv(16, 16))
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def data(n):
    y = torch.randint(4, (n,))
    t = torch.linspace(0, 6.28, 16)
    wave = torch.sin((y + 1).view(-1, 1) * t + 6.28 * torch.rand(n, 1))
    x = wave.unsqueeze(1).expand(-1, 16, -1) * 2.0 + 5.0 + 0.5 * torch.randn(n, 16, 16)
    return x.unsqueeze(1).to(DTYPE), y


net = Net().to(DTYPE)
masters = [p.detach().clone().float() for p in net.parameters()]
optimizer = torch.optim.AdamW(masters, lr=2e-3)
validation = data(128)
for step in range(200):
    net.train()
    x, y = data(32)
    net.zero_grad()
    F.cross_entropy(net(x).float(), y).backward()
    for master, p in zip(masters, net.parameters(), strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, net.parameters(), strict=True):
            p.copy_(master)
    if step % 10 == 9:
        net.eval()
        with torch.no_grad():
            val = F.cross_entropy(net(validation[0]).float(), validation[1])
        print(f"step {step} val loss {val.item():.4f}")
