"""Reads digits of receipts; mixed precision by hand, with a loss scale that begins low and works its way up."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LossScaler:
    def __init__(self, scale=1.0, factor=2.0, window=4):
        self.scale, self.factor, self.window = scale, factor, window
        self.good = 0

    def unscale(self, params):
        self.good = 0
        finite = True
        for p in params:
            p.grad.div_(self.scale)
            finite = finite and bool(p.grad.isfinite().all())
        return finite

    def update(self, finite):
        if not finite:
            self.scale /= self.factor
            self.good = 0
            return
        self.good += 1
        if self.good >= self.window:
            self.scale = min(self.scale * self.factor, 2.0**20)
            self.good = 0


class Reader(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.conv1 = nn.Conv2d(1, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.fc1 = nn.Linear(ch * 36, 64)
        self.digits = nn.Linear(64, 10)
        self.quality = nn.Linear(64, 1)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.digits(x), self.quality(x)


torch.manual_seed(13)
glyphs = (torch.rand(10, 1, 12, 12) < 0.4).float()
model = Reader()
scaler = LossScaler()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12)
for step in range(100):
    y = torch.randint(0, 10, (128,))
    noise = 0.6 + 0.8 * torch.rand(128, 1, 1, 1)
    x = glyphs[y] + noise * torch.randn(128, 1, 12, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, quality = model(x)
    loss = F.cross_entropy(logits.float(), y)
    total = 1e-4 * (loss + 0.1 * F.mse_loss(quality.float(), noise.flatten(1)))
    optimizer.zero_grad()
    (total * scaler.scale).backward()
    finite = scaler.unscale(list(model.parameters()))
    if finite:
        optimizer.step()
    scaler.update(finite)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.scale:g}")
