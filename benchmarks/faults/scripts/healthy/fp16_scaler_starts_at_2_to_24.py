"""FP16 autocast with a scaler that begins far too high and finds its level within a few skipped steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2162)
net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
    nn.Linear(16 * 36, 5),
)  # fmt: skip
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=40)
templates = torch.randn(5, 1, 12, 12)
for step in range(150):
    y = torch.randint(5, (32,))
    x = templates[y] + torch.randn(32, 1, 12, 12)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step} scale {scaler.get_scale():.0f} loss {loss.item():.4f}")
