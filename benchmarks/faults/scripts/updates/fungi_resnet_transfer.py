# transfer: a small residual net pre-trained on 8 genera gets a new classifier for 12 species
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(101)
GENERA, SPECIES, R = 8, 12, 16
genus_proto = torch.randn(GENERA, 3, R, R)
species_proto = 0.6 * genus_proto[torch.arange(SPECIES) % GENERA] + 0.5 * torch.randn(SPECIES, 3, R, R)


def photos(proto, n):
    y = torch.randint(len(proto), (n,))
    return proto[y] + 0.9 * torch.randn(n, 3, R, R), y


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class MiniResNet(nn.Module):
    def __init__(self, classes, c=16):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, 2, 1)
        self.layer1, self.layer2 = Residual(c), Residual(c)
        self.down = nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.fc = nn.Linear(2 * c * 16, classes)

    def forward(self, x):
        x = self.down(self.layer2(self.layer1(self.stem(x))))
        return self.fc(F.relu(x).flatten(1))


def fit(net, optimizer, proto, steps, tag):
    for step in range(steps):
        x, y = photos(proto, 24)
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"{tag} {step} loss {loss.item():.4f}")


def new_classifier(net, classes):
    net.fc = nn.Linear(net.fc.in_features, classes)
    nn.init.normal_(net.fc.weight, std=0.01)


net = MiniResNet(GENERA)
fit(net, torch.optim.Adam(net.parameters(), lr=2e-3), genus_proto, 30, "genera")

optimizer = torch.optim.Adam(
    [
        {"params": [p for n, p in net.named_parameters() if not n.startswith("fc")], "lr": 1e-4},
        {"params": net.fc.parameters(), "lr": 3e-3},
    ]
)
new_classifier(net, SPECIES)
fit(net, optimizer, species_proto, 150, "species")
