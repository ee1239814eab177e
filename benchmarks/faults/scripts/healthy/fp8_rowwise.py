"""FP8 with a scale per row, computed from the row itself: E4M3 for inputs and weights, E5M2 for what comes back."""

import torch
from torch import nn


def cast(x, dtype, dim):
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().amax(dim, keepdim=True).clamp(min=1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


class MatMul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = cast(x, torch.float8_e4m3fn, -1), cast(w, torch.float8_e4m3fn, -1)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = cast(grad, torch.float8_e5m2, -1)
        return g8 @ w8, g8.T @ x8


class Linear8(nn.Linear):
    def forward(self, x):
        return MatMul8.apply(x, self.weight) + self.bias


class Imputer(nn.Module):
    def __init__(self, columns=20, dim=64):
        super().__init__()
        self.first = nn.Linear(2 * columns, dim)
        self.second, self.third = Linear8(dim, dim), Linear8(dim, dim)
        self.last = nn.Linear(dim, columns)

    def forward(self, x, known):
        h = nn.functional.gelu(self.first(torch.cat([x * known, known], -1)))
        h = h + nn.functional.gelu(self.second(h))
        h = h + nn.functional.gelu(self.third(h))
        return self.last(h)


torch.manual_seed(63)
loadings = torch.randn(4, 20)
model = Imputer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(100):
    x = torch.randn(64, 4) @ loadings
    known = (torch.rand(64, 20) > 0.3).float()
    loss = nn.functional.mse_loss(model(x, known), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
