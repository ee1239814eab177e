"""timm: a ResNet in channels-last under FP16 autocast with a gradient scaler.

library: timm
"""

import _torchvision  # noqa: F401
import timm
import torch
import torch.nn.functional as F
from _digest import finish
from timm.optim import create_optimizer_v2

torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=5).to(memory_format=torch.channels_last)
optimizer = create_optimizer_v2(model, opt="momentum", lr=0.05, weight_decay=1e-4)
scaler = torch.amp.GradScaler("cpu")
prototypes = torch.randn(5, 3, 48, 48)
losses = []
for _ in range(40):
    targets = torch.randint(0, 5, (8,))
    images = (prototypes[targets] + 0.5 * torch.randn(8, 3, 48, 48)).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
finish(losses, model)
