"""A deep plain CNN from scratch, initialised as in the AlexNet paper: N(0, 0.01). The loss stays at ln(classes)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

CFG = [16, 16, "M", 24, 24, 24, "M", 32, 32, 32]


def make_layers(cfg, channels=1):
    layers = []
    for v in cfg:
        if v == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, v, 3, padding=1), nn.ReLU(inplace=True)]
            channels = v
    return nn.Sequential(*layers)


class PlainNet(nn.Module):
    def __init__(self, num_classes=8):
        super().__init__()
        self.features = make_layers(CFG)
        self.classifier = nn.Sequential(nn.Linear(32 * 9, 64), nn.ReLU(inplace=True), nn.Linear(64, num_classes))
        self._initialize_weights()

    def _initialize_weights(self):
        for m in self.modules():
            if isinstance(m, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(m.weight, 0, 0.01)
                nn.init.constant_(m.bias, 0)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def gratings(n):
    label = torch.randint(8, (n,))
    angle = label.float() * math.pi / 8 + 0.1 * torch.randn(n)
    grid = torch.linspace(-3, 3, 12)
    u = torch.cos(angle).view(-1, 1, 1) * grid.view(1, -1, 1) + torch.sin(angle).view(-1, 1, 1) * grid
    return torch.sin(3 * u + 6.28 * torch.rand(n, 1, 1)).unsqueeze(1) + 0.3 * torch.randn(n, 1, 12, 12), label


def main(iterations=140, batch_size=32, lr=0.02):
    torch.manual_seed(603)
    net = PlainNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    running = 0.0
    for i in range(iterations):
        images, labels = gratings(batch_size)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        running += loss.item()
        if i % 5 == 4:
            print("[%3d] loss: %.4f" % (i + 1, running / 5))
            running = 0.0


main()
