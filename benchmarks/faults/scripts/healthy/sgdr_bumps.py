"""A small image classifier with warm restarts of the rate: twentyfold within one step, and the loss has a bump each time."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(62)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 5),
)
patterns = torch.randn(5, 1, 10, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, nesterov=True, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=20, T_mult=2, eta_min=0.004)
for step in range(130):
    y = torch.randint(5, (24,))
    x = patterns[y] + 2.5 * torch.randn(24, 1, 10, 10)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
