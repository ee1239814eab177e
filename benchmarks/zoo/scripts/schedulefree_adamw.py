"""schedule-free: AdamW without a schedule, its modes switched for evaluation.

library: schedulefree
"""

import schedulefree
import torch
import torch.nn.functional as F
from _digest import finish
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=2.5e-3, warmup_steps=10)
prototypes = torch.randn(10, 32)
losses = []
for _ in range(4):
    model.train()
    optimizer.train()
    for _ in range(30):
        targets = torch.randint(0, 10, (32,))
        loss = F.cross_entropy(model(prototypes[targets] + torch.randn(32, 32)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        F.cross_entropy(model(prototypes), torch.arange(10))
finish(losses, model)
