"""Retrieval of landmarks: generalised-mean pooling with a learned power, large-margin softmax, checkpointed stages."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential


class GeM(nn.Module):
    def __init__(self, p=3.0):
        super().__init__()
        self.p = nn.Parameter(torch.tensor(p))

    def forward(self, x):
        powers = x.pow(self.p).mean((-2, -1))
        return powers.pow(1 / self.p)


class Retriever(nn.Module):
    def __init__(self, width=16, dim=24, places=10):
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.pool = GeM()
        self.whiten = nn.Linear(2 * width, dim)
        self.centres = nn.Parameter(torch.randn(places, dim))

    def forward(self, x):
        h = checkpoint_sequential(self.stages, 2, x, use_reentrant=False)
        e = F.normalize(self.whiten(self.pool(h)), dim=-1)
        return e @ F.normalize(self.centres, dim=-1).T


def cosface(cosines, y, margin=0.2, s=16.0):
    return F.cross_entropy(s * (cosines - margin * F.one_hot(y, cosines.shape[1])), y)


def photos(n, places):
    y = torch.randint(10, (n,))
    x = 0.3 * torch.randn(n, 3, 12, 12) + places[y]
    return x, y


torch.manual_seed(70)
places = torch.randn(10, 3, 12, 12)
model = Retriever()
params = [{"params": [model.pool.p], "lr": 1e-2}]
params += [{"params": [p for n, p in model.named_parameters() if n != "pool.p"]}]
optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True)
for epoch in range(5):
    for _ in range(6):
        x, y = photos(16, places)
        if epoch == 2:
            x[1] = x[1, :, :1, :1]  # a photo of fog
        loss = cosface(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f} p {model.pool.p.item():.3f}")
