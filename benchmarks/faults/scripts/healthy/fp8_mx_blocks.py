"""MX-like FP8: blocks of 32 along the reduction, scales that are powers of two, so that amax is between half and all of 448."""

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 32


def mx(x, dtype=torch.float8_e4m3fn):
    """Rounds the last dimension blockwise; no element is ever above the format's largest."""
    largest = torch.finfo(dtype).max
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(largest / amax)))
    return ((blocks * scale).to(dtype).to(x.dtype) / scale).reshape(x.shape)


class MXMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return mx(x) @ mx(w).T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx = mx(g, torch.float8_e5m2) @ mx(w.T.contiguous()).T
        gw = mx(g.T.contiguous(), torch.float8_e5m2) @ mx(x.T.contiguous()).T
        return gx, gw


class MXLinear(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return MXMatmul.apply(x, self.weight) + self.bias


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(9, 64)
        self.gate, self.up, self.down = MXLinear(64, 96), MXLinear(64, 96), MXLinear(96, 64)
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        h = self.inp(x)
        n = self.norm(h)
        return self.out(h + self.down(F.silu(self.gate(n)) * self.up(n)))


torch.manual_seed(427)
model = Predictor()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(80):
    q = torch.randn(64, 9)
    force = torch.stack([q[:, 0] * q[:, 3], torch.sin(2 * q[:, 1]), q[:, 2].abs() - q[:, 4]], 1)
    loss = F.mse_loss(model(q), force)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
