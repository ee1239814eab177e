"""fastai: one cycle with mixup on small images.

library: fastai
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import Learner  # adds fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from torch import nn

set_seed(0, reproducible=True)
prototypes = torch.randn(6, 3, 16, 16)
targets = torch.randint(0, 6, (320,))
items = list(zip(prototypes[targets] + torch.randn(320, 3, 16, 16), targets, strict=True))
loaders = DataLoaders(
    DataLoader(items[:256], bs=16, shuffle=True, num_workers=0), DataLoader(items[256:], bs=32, num_workers=0)
)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 6),
)
learner = Learner(loaders, model, loss_func=CrossEntropyLossFlat(), cbs=[MixUp(0.4)])
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(4, 3e-3)
finish(learner.recorder.losses, model)
