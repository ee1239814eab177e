"""ResNet with OneCycleLR: the loss has a hump while the rate climbs to its peak, and falls for good when it goes down."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.down = nn.Conv2d(a, b, 1, stride, bias=False) if stride > 1 or a != b else None
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet9(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12)
        self.layers = nn.Sequential(BasicBlock(12, 12, 1), BasicBlock(12, 24, 2), BasicBlock(24, 24, 1))
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        return self.fc(self.layers(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randint(8, (n,), generator=g)
    return TensorDataset(proto[y] + 1.5 * torch.randn(n, 3, 8, 8, generator=g), y)


torch.manual_seed(526)
loader = DataLoader(make(768, 2), batch_size=32, shuffle=True)
test = DataLoader(make(128, 3), batch_size=64)
net, epochs = ResNet9(), 7
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.3, total_steps=epochs * len(loader), pct_start=0.4)
n = 0
for epoch in range(epochs):
    net.train()
    for x, y in loader:
        loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if n % 3 == 0:
            print(f"{n} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.3f}")
        n += 1
    net.eval()
    with torch.no_grad():
        print(f"accuracy {sum((net(x).argmax(1) == y).sum().item() for x, y in test) / 128:.3f}")
