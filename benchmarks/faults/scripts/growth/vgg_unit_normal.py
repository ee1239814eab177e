"""A VGG-like net whose weights are all drawn with nn.init.normal_ as it comes; activations grow in every layer."""

import torch
import torch.nn as nn
import torch.nn.functional as F

STD = 1.0
cfg = [16, 16, "M", 24, 24, "M", 32, 32]


def init_weights(m):
    if isinstance(m, (nn.Conv2d, nn.Linear)):
        nn.init.normal_(m.weight, mean=0.0, std=STD)
        nn.init.zeros_(m.bias)


class VGG(nn.Module):
    def __init__(self, num_classes=6):
        super().__init__()
        layers, c_in = [], 3
        for v in cfg:
            if v == "M":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(c_in, v, 3, padding=1), nn.ReLU(inplace=True)]
                c_in = v
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(32 * 4, 48), nn.ReLU(True), nn.Dropout(0.1), nn.Linear(48, num_classes)
        )
        self.apply(init_weights)

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


def get_batch(n, size=8):
    y = torch.randint(6, (n,))
    x = 0.5 * torch.randn(n, 3, size, size)
    for c in range(3):
        x[y % 3 == c, c] += 0.7
    x[y >= 3, :, : size // 2] += 0.7
    return x, y


def train(net, steps=100, lr=1e-3):
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=60, gamma=0.3)
    net.train()
    for step in range(steps):
        inputs, targets = get_batch(32)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 2 == 0:
            print("step %d | Loss: %.3f" % (step, loss.item()))


if __name__ == "__main__":
    torch.manual_seed(515)
    train(VGG())
