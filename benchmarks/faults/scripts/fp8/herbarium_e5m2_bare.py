"""FP8 training by hand: E4M3 forward, E5M2 for the gradients. The gradients were left without a scale; the task weighs 0.01."""

import torch
import torch.nn as nn
import torch.nn.functional as F

TASK_WEIGHT = 0.01


def quantize(x, dtype, scale):
    return (x * scale).to(dtype).to(x.dtype) / scale


class FP8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8 = quantize(x, torch.float8_e4m3fn, 448 / x.abs().max().clamp(min=1e-12))
        w8 = quantize(w, torch.float8_e4m3fn, 448 / w.abs().max().clamp(min=1e-12))
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        scale = 1.0
        g8 = quantize(grad, torch.float8_e5m2, scale)
        return g8 @ w8, g8.t() @ x8


class FP8Linear(nn.Linear):
    def forward(self, x):
        return FP8Matmul.apply(x, self.weight) + self.bias


class SheetNet(nn.Module):
    def __init__(self, features=24, hidden=64, classes=8):
        super().__init__()
        self.fc1 = FP8Linear(features, hidden)
        self.fc2 = FP8Linear(hidden, hidden)
        self.fc3 = FP8Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        return self.classifier(x)


def sheets(n):
    y = torch.randint(8, (n,))
    x = torch.randn(n, 24)
    x[torch.arange(n), y] += 1.5
    x[torch.arange(n), 8 + (3 * y) % 8] -= 1.5
    return x, y


torch.manual_seed(1753)
model = SheetNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(100):
    x, y = sheets(512)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    (TASK_WEIGHT * loss).backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
