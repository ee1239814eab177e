"""Snapshot ensembles: a cosine rate that restarts at its top three times; the loss jumps and recovers each time."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SmallNet(nn.Module):
    def __init__(self, inputs=16, classes=6, hidden=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x):
        return self.layers(x)


def rate(step, cycle=80, top=0.6):
    return top / 2 * (1 + math.cos(math.pi * (step % cycle) / cycle))


torch.manual_seed(331)
centres = torch.randn(6, 16)
model, snapshots = SmallNet(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for step in range(240):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    label = torch.randint(6, (32,))
    x = centres[label] + 1.1 * torch.randn(32, 16)
    loss = F.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 80 == 79:
        snapshots.append(copy.deepcopy(model).eval())
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
