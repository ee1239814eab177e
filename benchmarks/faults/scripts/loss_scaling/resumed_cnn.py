"""Resumes a classifier, scaler included: the checkpoint was written after the old data had made the loss scale collapse."""

import torch
import torch.nn.functional as F
from torch import nn


class SqueezeExcite(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x):
        s = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        return x * s[:, :, None, None]


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.norm1, self.se = nn.BatchNorm2d(width), SqueezeExcite(width)
        self.conv, self.norm2 = nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 8)

    def forward(self, x):
        x = self.se(F.relu(self.norm1(self.stem(x))))
        return self.fc(F.relu(self.norm2(self.conv(x))).mean((2, 3)))


def resume(scaler):
    checkpoint = {
        "scale": 2.0**-14,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 11,
    }
    scaler.load_state_dict(checkpoint)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
resume(scaler)
textures = torch.randn(8, 3, 16, 16)
for step in range(50):
    y = torch.randint(8, (32,))
    x = textures[y] + 1.5 * torch.randn(32, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
