"""timm: a ViT with mixup and cutmix, LAMB, EMA of weights, cosine schedule with warm-up, clipping.

library: timm
"""

import random

import _torchvision  # noqa: F401
import numpy as np
import timm
import torch
from _digest import finish
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad

random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
model = timm.create_model(
    "vit_tiny_patch16_224",
    img_size=32,
    patch_size=8,
    embed_dim=48,
    depth=3,
    num_heads=3,
    num_classes=10,
    drop_path_rate=0.1,
)
optimizer = create_optimizer_v2(model, opt="lamb", lr=5e-3, weight_decay=0.02)
schedule = CosineLRScheduler(optimizer, t_initial=60, warmup_t=5, warmup_lr_init=1e-6, t_in_epochs=False)
mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
average = ModelEmaV3(model, decay=0.99)
objective = SoftTargetCrossEntropy()
prototypes = torch.randn(10, 3, 32, 32)
losses = []
for step in range(60):
    targets = torch.randint(0, 10, (16,))
    images, targets = mixup(prototypes[targets] + 0.5 * torch.randn(16, 3, 32, 32), targets)
    optimizer.zero_grad()
    loss = objective(model(images), targets)
    loss.backward()
    dispatch_clip_grad(model.parameters(), 1.0)
    optimizer.step()
    average.update(model, step=step)
    schedule.step_update(step)
    losses.append(loss.item())
finish(losses, model, average)
