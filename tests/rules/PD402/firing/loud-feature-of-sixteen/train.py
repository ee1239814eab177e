"""One feature of sixteen is a million times the others: FP8 at one scale leaves only that one."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10


def cast(x, dtype):
    """Through FP8 and back, at the scale of the tensor's amax."""
    scale = torch.finfo(dtype).max / x.abs().amax().clamp_min(1e-30)
    return (x * scale).to(dtype).float() / scale


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = cast(x, torch.float8_e4m3fn), cast(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = cast(gradient, torch.float8_e5m2)
        return gradient @ weight, gradient.t() @ x


class FP8Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return Product.apply(x, self.weight)


torch.manual_seed(0)
model = nn.Sequential(FP8Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x = torch.randn(64, 16)
    target = x[:, :4].clone()
    x[:, 7] *= 2.0**20
    loss = F.mse_loss(model(x), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
