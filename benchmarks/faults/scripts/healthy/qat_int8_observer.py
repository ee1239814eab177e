"""Quantisation-aware training: weights and activations are rounded to INT8 with a straight-through gradient."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class FakeQuant(nn.Module):
    def __init__(self, momentum=0.05):
        super().__init__()
        self.register_buffer("amax", torch.tensor(0.0))
        self.momentum = momentum

    def forward(self, x):
        now = x.detach().abs().max()
        self.amax = torch.where(self.amax == 0, now, self.amax + self.momentum * (now - self.amax))
        scale = self.amax / 127
        q = (x / scale).round().clamp(-127, 127) * scale
        return x + (q - x).detach()


class QLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.quant_x, self.quant_w = FakeQuant(), FakeQuant(1.0)

    def forward(self, x):
        return F.linear(self.quant_x(x), self.quant_w(self.weight), self.bias)


torch.manual_seed(2166)
model = nn.Sequential(QLinear(8, 48), nn.ReLU6(), QLinear(48, 48), nn.ReLU6(), QLinear(48, 3))
teacher = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(250):
    x = torch.randn(64, 8)
    with torch.no_grad():
        y = 5 * teacher(x)
    loss = F.cross_entropy(model(x), y.argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
