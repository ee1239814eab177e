import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Sequential):
    def __init__(self, d=32):
        super().__init__(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, d))


class BYOL(nn.Module):
    """Online and target encoder; the target follows with a momentum that is annealed to one."""

    def __init__(self):
        super().__init__()
        self.online = Encoder()
        self.predictor = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a, b):
        with torch.no_grad():
            goal = F.normalize(self.target(b), dim=-1)
        return 2 - 2 * (F.normalize(self.predictor(self.online(a)), dim=-1) * goal).sum(-1).mean()

    @torch.no_grad()
    def follow(self, momentum):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.lerp_(o, 1 - momentum)


class Probe(nn.Module):
    def __init__(self, encoder, classes):
        super().__init__()
        self.encoder = encoder.requires_grad_(False).eval()
        self.linear = nn.Linear(32, classes)

    def forward(self, x):
        with torch.no_grad():
            h = self.encoder(x)
        return self.linear(h)
