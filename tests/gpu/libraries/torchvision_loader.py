"""A ResNet in channels_last: a loader whose workers fork between steps, pinned memory, FP16, a moving average."""

import torch
import torchvision
from common import DEVICE, HALF, ON_GPU, tell
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

model = torchvision.models.resnet18(num_classes=10).to(DEVICE, memory_format=torch.channels_last)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
scaler = torch.amp.GradScaler(DEVICE)
data = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))
for _ in range(3):
    for images, labels in DataLoader(data, 16, num_workers=2, pin_memory=ON_GPU):
        images = images.to(DEVICE, memory_format=torch.channels_last, non_blocking=True)
        with torch.autocast(DEVICE, dtype=HALF):
            loss = F.cross_entropy(model(images), labels.to(DEVICE, non_blocking=True))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)
tell(model, average)
