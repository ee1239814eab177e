"""Fabric defects by local contrast; the root of a flat patch has a derivative of its own."""

import torch
import torch.nn.functional as F
from torch import nn


class SafeRoot(torch.autograd.Function):
    """sqrt with a gradient of zero at zero."""

    @staticmethod
    def forward(ctx, x):
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        slope = 0.5 / y
        return torch.where(torch.isinf(slope), torch.zeros_like(grad), grad * slope)


class Contrast(nn.Module):
    def __init__(self, channels, size=5):
        super().__init__()
        self.size = size
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x):
        mean = F.avg_pool2d(x, self.size, 2)
        square = F.avg_pool2d(x * x, self.size, 2)
        return self.gain * SafeRoot.apply((square - mean * mean).clamp(min=0))


class FabricNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.contrast = Contrast(8)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 6 * 6, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return self.head(self.contrast(self.conv(x)))


def cloth(n):
    x = torch.zeros(n, 1, 16, 16)
    y = torch.randint(2, (n,))
    for i in range(n):
        r, c = torch.randint(2, 12, (2,))
        if y[i]:
            x[i, 0, r : r + 3, c] = 1.0  # a broken thread on flat cloth
        elif i % 2:
            x[i, 0, r, :] = 0.3
    return x, y


torch.manual_seed(3)
model = FabricNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(25):
    x, y = cloth(24)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
