"""kornia: a classifier behind augmentations on tensors, which are modules as well.

library: kornia
"""

import kornia.augmentation as K
import torch
from _digest import finish
from kornia.losses import FocalLoss
from torch import nn

torch.manual_seed(0)
augment = K.AugmentationSequential(
    K.RandomHorizontalFlip(p=0.5),
    K.RandomAffine(10.0, p=0.7),
    K.ColorJitter(0.1, 0.1, 0.1, 0.1, p=0.5),
    data_keys=["input"],
)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(1568, 5),
)
objective = FocalLoss(alpha=0.5, gamma=2.0, reduction="mean")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
prototypes = torch.rand(5, 3, 32, 32)
losses = []
for _ in range(40):
    targets = torch.randint(0, 5, (16,))
    with torch.no_grad():
        images = augment((prototypes[targets] + 0.1 * torch.randn(16, 3, 32, 32)).clamp(0, 1))
    loss = objective(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
