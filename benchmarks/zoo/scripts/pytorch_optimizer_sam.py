"""pytorch-optimizer: SAM, two passes a step, around Adan.

library: pytorch-optimizer
"""

import torch
import torch.nn.functional as F
from _digest import finish
from pytorch_optimizer import SAM, Adan
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Mish(), nn.Linear(64, 10))
optimizer = SAM(model.parameters(), Adan, rho=0.05, lr=2e-3)
prototypes = torch.randn(10, 32)
losses = []
for _ in range(60):
    targets = torch.randint(0, 10, (32,))
    inputs = prototypes[targets] + torch.randn(32, 32)
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.second_step(zero_grad=True)
    losses.append(loss.item())
finish(losses, model)
