"""Counts plums in photos of trees. FP16 with a GradScaler; gradients are clipped to a norm of one, and SGD takes the step."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class PlumCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.density = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return F.softplus(self.density(x)).sum((1, 2, 3)) / 16


def trees(n, size=20):
    x = 0.2 * torch.randn(n, 1, size, size)
    count = torch.randint(0, 7, (n,))
    for i, c in enumerate(count.tolist()):
        for _ in range(c):
            r, k = torch.randint(0, size - 2, (2,)).tolist()
            x[i, 0, r : r + 3, k : k + 3] += 1.5
    return x, count.float()


torch.manual_seed(1066)
model = PlumCounter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(120):
    x, count = trees(16)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(x)
    loss = F.smooth_l1_loss(pred.float(), count)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
