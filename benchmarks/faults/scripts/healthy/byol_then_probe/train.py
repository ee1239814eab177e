"""Songs of insects: BYOL without labels first, then a linear probe on the frozen encoder."""

import math

import torch
import torch.nn.functional as F

from byol import BYOL, Probe

torch.manual_seed(73)
SPECIES = 8
songs = 1.2 * torch.randn(SPECIES, 24)


def recordings(n):
    y = torch.randint(SPECIES, (n,))
    return songs[y] + 0.7 * torch.randn(n, 24), y


def augment(x):
    return (x * (1 + 0.2 * torch.randn(len(x), 1)) + 0.3 * torch.randn_like(x)) * (torch.rand_like(x) > 0.1)


PRETRAIN, PROBE = 240, 200
byol = BYOL()
optimizer = torch.optim.AdamW([*byol.online.parameters(), *byol.predictor.parameters()], lr=1e-3)
for step in range(PRETRAIN):
    x, _ = recordings(64)
    similarity = 0.5 * (byol(augment(x), augment(x)) + byol(augment(x), augment(x)))
    optimizer.zero_grad()
    similarity.backward()
    optimizer.step()
    byol.follow(1 - 0.01 * (1 + math.cos(math.pi * step / PRETRAIN)) / 2)
    if step % 40 == 0:
        print(f"pretraining {step}: {similarity.item():.4f}")

probe = Probe(byol.online, SPECIES)
optimizer = torch.optim.SGD(probe.linear.parameters(), lr=0.1, momentum=0.9)
for step in range(PROBE):
    x, y = recordings(64)
    loss = F.cross_entropy(probe(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"probe {step} loss {loss.item():.4f}")
