"""A ResNet without norms, initialised by Fixup: the last convolution of every branch and the classifier are zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class FixupBlock(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.bias1a, self.bias1b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.bias2a, self.bias2b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        nn.init.normal_(self.conv1.weight, std=(2 / (9 * width)) ** 0.5 * depth**-0.5)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x):
        out = F.relu(self.conv1(x + self.bias1a) + self.bias1b)
        out = self.conv2(out + self.bias2a) * self.scale + self.bias2b
        return F.relu(x + out)


class FixupNet(nn.Module):
    def __init__(self, width=16, depth=6, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[FixupBlock(width, depth) for _ in range(depth)])
        self.fc = nn.Linear(width, classes)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def photos(n):
    y = torch.randint(4, (n,))
    x = 0.5 * torch.randn(n, 3, 16, 16)
    stripes = torch.sin(torch.arange(16.0) * (y[:, None] + 1) * 0.5)[:, None, :]
    x[torch.arange(n), y % 3] += 2 * stripes + (y == 3).view(-1, 1, 1)
    return x, y


torch.manual_seed(16)
model = FixupNet()
slow = [p for n, p in model.named_parameters() if "bias" in n or "scale" in n]
fast = [p for n, p in model.named_parameters() if "bias" not in n and "scale" not in n]
optimizer = torch.optim.SGD([{"params": fast}, {"params": slow, "lr": 0.01}], lr=0.03, momentum=0.9, weight_decay=5e-4)
for step in range(75):
    x, y = photos(32)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
