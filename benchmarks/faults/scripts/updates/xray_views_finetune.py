"""Adapts a view classifier (AP, PA, lateral) to a new scanner. Low rate, a few epochs, checkpoint's dtype."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(21)
DTYPE = torch.bfloat16
SIDE, VIEWS = 12, 3
prototypes = torch.randn(VIEWS, 1, SIDE, SIDE)


def films(n, scanner):
    y = torch.randint(VIEWS, (n,))
    x = prototypes[y] + 1.2 * torch.randn(n, 1, SIDE, SIDE)
    if scanner == "new":
        x = 0.6 * x.flip(-1) + 0.5
    return x, y


class ViewNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(32 * 9, 64)
        self.fc2 = nn.Linear(64, VIEWS)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x)).flatten(1)
        return self.fc2(F.gelu(self.fc1(x)))


def pretrain(net, steps=60):
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        x, y = films(64, "old")
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()


net = ViewNet()
pretrain(net)
net = net.to(DTYPE)
opt = torch.optim.AdamW(net.parameters(), lr=3e-5, weight_decay=0.01)
held_x, held_y = films(512, "new")
for step in range(160):
    x, y = films(64, "new")
    opt.zero_grad()
    F.cross_entropy(net(x.to(DTYPE)).float(), y).backward()
    opt.step()
    if step % 8 == 7:
        with torch.no_grad():
            held = F.cross_entropy(net(held_x.to(DTYPE)).float(), held_y)
        print(f"step {step + 1} held-out loss {held.item():.4f}")
