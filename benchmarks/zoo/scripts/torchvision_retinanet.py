"""torchvision: RetinaNet on a small backbone finds bright boxes.

library: torchvision
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from torch import nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

torch.manual_seed(0)
body = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
)
body.out_channels = 64
model = RetinaNet(
    body,
    num_classes=3,
    min_size=64,
    max_size=64,
    anchor_generator=AnchorGenerator(sizes=((8, 16, 32),), aspect_ratios=((0.5, 1.0, 2.0),)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9, weight_decay=1e-4)
losses = []
for _ in range(25):
    images, targets = [], []
    for _ in range(2):
        x, y, w, h = (int(v) for v in torch.randint(8, 28, (4,)))
        image = 0.1 * torch.randn(3, 64, 64)
        image[:, y : y + h, x : x + w] += 1
        images.append(image)
        targets.append({"boxes": torch.tensor([[x, y, x + w, y + h]]).float(), "labels": torch.tensor([1 + (w > h)])})
    loss = sum(model(images, targets).values())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
