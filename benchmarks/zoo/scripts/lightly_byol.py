"""lightly: BYOL, a momentum copy that takes no gradient.

library: lightly
"""

import copy

import _torchvision  # noqa: F401
import torch
from _digest import finish
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.BatchNorm1d(64), nn.ReLU())
online = nn.Sequential(body, BYOLProjectionHead(64, 64, 16))
predict = BYOLPredictionHead(16, 32, 16)
target = copy.deepcopy(online)
deactivate_requires_grad(target)
objective = NegativeCosineSimilarity()
optimizer = torch.optim.SGD([*online.parameters(), *predict.parameters()], lr=0.05, momentum=0.9)
losses = []
for _ in range(50):
    update_momentum(online, target, m=0.99)
    images = torch.randn(32, 3, 8, 8)
    a, b = (images + 0.3 * torch.randn_like(images) for _ in "ab")
    with torch.no_grad():
        goals = target(a), target(b)
    loss = 0.5 * (objective(predict(online(a)), goals[1]) + objective(predict(online(b)), goals[0]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, online, predict, target)
