import torch
from torch import nn


class SwayBackbone(nn.Module):
    """Strided convolutions over the sway sensors of a container crane."""

    def __init__(self, channels=6, width=24):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, width, 7, stride=2, padding=3)
        self.bn1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, 2 * width, 5, stride=2, padding=2)
        self.bn2 = nn.BatchNorm1d(2 * width)
        self.conv3 = nn.Conv1d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.bn3 = nn.BatchNorm1d(2 * width)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return torch.relu(self.bn3(self.conv3(x)))


class LoadClassifier(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.backbone = SwayBackbone()
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, classes))

    def forward(self, x):
        return self.head(self.pool(self.backbone(x)).flatten(1))


def set_trainable(module, on):
    for parameter in module.parameters():
        parameter.requires_grad_(on)
