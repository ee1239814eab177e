import torch
import torch.nn as nn


class Projector(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, out), nn.BatchNorm1d(out, affine=False))

    def forward(self, h):
        return self.net(h)


class Similarity(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, a, b):
        z = torch.cat([a, b])
        logits = z @ z.T / self.temperature
        return logits.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)


class SimCLR(nn.Module):
    def __init__(self, features=32, width=128, out=32, temperature=0.1):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.projector = Projector(width, out)
        self.similarity = Similarity(temperature)

    def forward(self, a, b):
        return self.similarity(self.projector(self.encoder(a)), self.projector(self.encoder(b)))
