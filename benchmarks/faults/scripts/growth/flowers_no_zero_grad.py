"""Transfer learning as in the notebooks; between the cells, optimizer.zero_grad() was lost."""

import math

import torch
import torch.nn as nn


class Backbone(nn.Module):
    """Stands for the pre-trained features: fixed filters of edges and blobs."""

    def __init__(self, out=24):
        super().__init__()
        self.conv = nn.Conv2d(3, out, 5, stride=2, padding=2)
        self.pool = nn.AdaptiveAvgPool2d(2)
        for p in self.parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.pool(torch.relu(self.conv(x))).flatten(1)


class FlowerNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.features = Backbone()
        self.bn = nn.BatchNorm1d(96)
        self.classifier = nn.Sequential(
            nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes)
        )

    def forward(self, x):
        return self.classifier(self.bn(self.features(x)))


def flowers(n, size=20):
    label = torch.randint(6, (n,))
    grid = torch.linspace(-1, 1, size)
    radius = (grid[:, None] ** 2 + grid**2).sqrt()
    angle = torch.atan2(grid[:, None].expand(size, size), grid.expand(size, size))
    petals = 3 + (label % 3).float()
    edge = 0.6 + 0.3 * torch.cos(petals[:, None, None] * angle + 2 * math.pi * torch.rand(n, 1, 1))
    shape = (radius < edge).float()
    hue = torch.where(label[:, None] < 3, torch.tensor([1.0, 0.3, 0.3]), torch.tensor([0.5, 0.3, 1.0]))
    return shape[:, None] * hue[:, :, None, None] + 0.2 * torch.randn(n, 3, size, size), label


torch.manual_seed(612)
model = FlowerNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.classifier.parameters(), lr=0.02)
print_every, running_loss = 4, 0.0
for steps in range(1, 181):
    inputs, labels = flowers(32)
    logps = model(inputs)
    loss = criterion(logps, labels)
    loss.backward()
    optimizer.step()
    running_loss += loss.item()
    if steps % print_every == 0:
        print(f"Step {steps}.. Train loss: {running_loss / print_every:.3f}")
        running_loss = 0.0
