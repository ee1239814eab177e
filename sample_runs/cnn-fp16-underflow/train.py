"""A CNN in FP16 autocast without a loss scaler: no NaN anywhere, but most gradients are rounded to zero on the way."""

import torch
from torch import nn

STEPS = 16

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.Tanh(),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.BatchNorm2d(8),
    nn.Tanh(),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.Tanh(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
pixel_loss = nn.MSELoss()
for step in range(STEPS):
    labels = torch.randint(10, (16,))
    images = torch.randn(16, 1, 12, 12) + labels.view(-1, 1, 1, 1) / 5
    with torch.autocast("cpu", dtype=torch.float16):
        # A mean over many outputs and a small weight: each gradient is tiny from the start.
        loss = 1e-4 * pixel_loss(model(images), torch.eye(10)[labels].half())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4e}")
