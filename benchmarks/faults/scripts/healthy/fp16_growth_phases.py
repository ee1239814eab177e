"""A convolutional classifier, FP16 autocast: the scaler doubles every 15 steps until it overflows, and goes back one step."""

import torch
import torch.nn.functional as F
from torch import nn


class Separable(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.depth = nn.Conv2d(cin, cin, 3, stride, 1, groups=cin, bias=False)
        self.point, self.norm = nn.Conv2d(cin, cout, 1, bias=False), nn.BatchNorm2d(cout)

    def forward(self, x):
        return F.relu6(self.norm(self.point(self.depth(x))))


class MobileNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.features = nn.Sequential(Separable(16, 24, 1), Separable(24, 32, 2), Separable(32, 48, 1))
        self.classifier = nn.Linear(48, classes)

    def forward(self, x):
        return self.classifier(self.features(F.relu6(self.stem(x))).mean((2, 3)))


torch.manual_seed(2)
model = MobileNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=15)
prototypes = torch.randn(5, 3, 16, 16)
for step in range(240):
    y = torch.randint(5, (24,))
    x = prototypes[y] + 1.5 * torch.randn(24, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
