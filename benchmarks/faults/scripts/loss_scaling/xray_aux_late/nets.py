import torch.nn as nn
import torch.nn.functional as F


class ChestNet(nn.Module):
    """Trunk with a head for the finding and one for its place, which is a grid of 3x3."""

    def __init__(self, width=16):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1)
        )
        self.finding = nn.Linear(width, 4)
        self.place = nn.Sequential(nn.Linear(width * 36, 48), nn.ReLU(), nn.Linear(48, 9))

    def forward(self, x):
        h = F.relu(self.trunk(x))
        return self.finding(h.mean((2, 3))), self.place(h.flatten(1))
