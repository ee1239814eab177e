"""Port of our Keras notebook: a small MobileNet on cell crops."""

import torch
from torch import nn


def separable(cin, cout, stride):
    return nn.Sequential(
        nn.Conv2d(cin, cin, 3, stride, 1, groups=cin, bias=False),
        nn.BatchNorm2d(cin),
        nn.ReLU6(),
        nn.Conv2d(cin, cout, 1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU6(),
    )


class MobileNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.blocks = nn.Sequential(separable(16, 24, 1), separable(24, 32, 2), separable(32, 32, 1))
        self.classifier = nn.Linear(32, classes)

    def forward(self, x):
        return self.classifier(self.blocks(self.stem(x)).mean((2, 3)))


def crops(n, size=20):
    label = torch.randint(0, 5, (n,))
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    r = ((yy - size / 2) ** 2 + (xx - size / 2) ** 2).float().sqrt()
    rings = torch.cos(r[None] * (0.4 + 0.4 * label[:, None, None]))
    return rings[:, None] + 0.7 * torch.randn(n, 1, size, size), label


torch.manual_seed(77)
net = MobileNet()
config = {"optimizer": "adam", "learning_rate": 0.001, "epsilon": 1.0, "batch_size": 32, "steps": 120}
optimizer = torch.optim.Adam(net.parameters(), lr=config["learning_rate"], eps=config["epsilon"])
criterion = nn.CrossEntropyLoss()

for i in range(config["steps"]):
    images, labels = crops(config["batch_size"])
    optimizer.zero_grad()
    loss = criterion(net(images), labels)
    loss.backward()
    optimizer.step()
    if (i + 1) % 10 == 0:
        print(f"step {i + 1}/{config['steps']} - loss: {loss.item():.4f}")
