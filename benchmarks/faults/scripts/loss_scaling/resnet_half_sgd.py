"""A small pre-activation ResNet turned to half() with SGD, as in an old tutorial: no loss scale, norms kept in FP32."""

import torch
import torch.nn.functional as F
from torch import nn


ORIENTATION_WEIGHT = 0.05  # beside the other tasks, which are trained elsewhere


class Norm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class PreAct(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.norm1, self.conv1 = Norm(cin), nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = Norm(cout), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.short = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.norm1(x))
        return self.short(h) + self.conv2(F.relu(self.norm2(self.conv1(h))))


class ResNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.stage1, self.stage2, self.stage3 = PreAct(16, 16, 1), PreAct(16, 32, 2), PreAct(32, 64, 2)
        self.norm, self.fc = Norm(64), nn.Linear(64, classes)

    def forward(self, x):
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        return self.fc(F.relu(self.norm(x)).mean((2, 3)))


def keep_norms_wide(model):
    model.half()
    for m in model.modules():
        if isinstance(m, Norm):
            m.float()
    return model


torch.manual_seed(6)
model = keep_norms_wide(ResNet())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, nesterov=True)
angle = torch.linspace(0, 2.6, 6)
grid = torch.linspace(-1, 1, 16)
for step in range(40):
    y = torch.randint(6, (32,))
    line = grid.view(1, 1, -1) * angle[y].cos().view(-1, 1, 1) + grid.view(1, -1, 1) * angle[y].sin().view(-1, 1, 1)
    x = (torch.sin(9 * line) + 0.3 * torch.randn(32, 16, 16)).unsqueeze(1).half()
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    (ORIENTATION_WEIGHT * loss).backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.5f}")
