import torch
from torch import nn


class AudioTower(nn.Module):
    """Six convolutions over a mel spectrogram of the hive, with a stride in every second one."""

    def __init__(self, width=24):
        super().__init__()
        sizes = [
            (1, width, 2),
            (width, width, 1),
            (width, width, 2),
            (width, width, 1),
            (width, width, 2),
            (width, width, 1),
        ]
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, stride=s, padding=1) for i, o, s in sizes)

    def forward(self, mel):
        for conv in self.convs:
            mel = torch.relu(conv(mel))
        return mel.mean((2, 3))


class ClimateTower(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 48), nn.Linear(48, width)

    def forward(self, climate):
        return torch.relu(self.fc2(torch.relu(self.fc1(climate))))


class HiveState(nn.Module):
    def __init__(self, width=24, states=4):
        super().__init__()
        self.audio, self.climate = AudioTower(width), ClimateTower(width)
        self.fuse = nn.Linear(2 * width, 48)
        self.out = nn.Linear(48, states)

    def forward(self, mel, climate):
        both = torch.cat([self.audio(mel), self.climate(climate)], 1)
        return self.out(torch.relu(self.fuse(both)))


def init_weights(module):
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
