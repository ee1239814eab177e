"""lightly: SimCLR with NT-Xent on two noisy views.

library: lightly
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    SimCLRProjectionHead(32, 32, 16),
)
objective = NTXentLoss(temperature=0.2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
losses = []
for _ in range(40):
    images = torch.randn(24, 3, 16, 16)
    views = [images * (0.6 + 0.8 * torch.rand(24, 1, 1, 1)) + 0.3 * torch.randn_like(images) for _ in "ab"]
    loss = objective(model(views[0]), model(views[1]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
