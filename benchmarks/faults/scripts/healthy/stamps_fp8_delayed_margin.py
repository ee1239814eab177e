"""FP8 by hand: E4M3 forward, E5M2 gradients, a scale for each tensor from the largest of 16 past amax, margin of one bit."""

from collections import deque

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(613)


class DelayedScale:
    def __init__(self, dtype, history=16, margin=1):
        self.dtype, self.top, self.margin = dtype, torch.finfo(dtype).max, margin
        self.history = deque(maxlen=history)

    def cast(self, x):
        self.history.append(x.detach().abs().amax().item())
        amax = max(self.history)
        scale = self.top / amax / 2**self.margin if amax > 0 else 1.0
        return (x * scale).clamp(-self.top, self.top).to(self.dtype).to(x.dtype) / scale


class Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scales):
        x8, w8 = scales[0].cast(x), scales[1].cast(weight)
        ctx.save_for_backward(x8, w8)
        ctx.scale = scales[2]
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = ctx.scale.cast(grad)
        return g8 @ w8, g8.t() @ x8, None


class Fp8Linear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        self.scales = DelayedScale(e4m3), DelayedScale(e4m3), DelayedScale(e5m2)

    def forward(self, x):
        return Fp8Matmul.apply(x, self.weight, self.scales) + self.bias


class StampNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.fc1, self.fc2 = nn.Linear(32, 64), Fp8Linear(64, 128), Fp8Linear(128, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.norm(x + self.fc2(F.gelu(self.fc1(x)))))


model, designs = StampNet(), torch.randn(8, 32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(200):
    y = torch.randint(8, (64,))
    loss = F.cross_entropy(model(0.7 * designs[y] + torch.randn(64, 32)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
