"""Traffic signs, small ResNet, fp16 autocast + GradScaler + clipping."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(7)
CLASSES, SIDE = 6, 12
signs = torch.randn(CLASSES, 3, SIDE, SIDE)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.b = nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.na, self.nb = nn.GroupNorm(4, c), nn.GroupNorm(4, c)

    def forward(self, x):
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))


class SignNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(c), Block(c))
        self.fc = nn.Linear(c, CLASSES)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def photos(n):
    y = torch.randint(CLASSES, (n,))
    return signs[y] + 0.8 * torch.randn(n, 3, SIDE, SIDE), y


net = SignNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for step in range(100):
    x, y = photos(32)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"{step:3d} loss {loss.item():.4f}")
