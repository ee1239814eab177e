"""A small FP8 layer with a current scale per tensor. Somebody has mixed up the scale and its inverse for the activations."""

import torch
from torch import nn

FP8, LARGEST = torch.float8_e4m3fn, 448.0


def scale_and_inverse(x):
    amax = x.detach().abs().amax().clamp(min=1e-12)
    return LARGEST / amax, amax / LARGEST


def quantise(x, multiplier):
    return (x * multiplier).clamp(-LARGEST, LARGEST).to(FP8)


class ScaledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        sw, isw = scale_and_inverse(w)
        isx, sx = scale_and_inverse(x)
        qx, qw = quantise(x, sx), quantise(w, sw)
        return (qx.to(x.dtype) / sx) @ (qw.to(w.dtype) * isw).T

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.T @ x


class Linear8(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return ScaledMatmul.apply(x, self.weight) + self.bias


def build():
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), Linear8(40, 40), nn.Tanh(), Linear8(40, 3))


def rings(n):
    r, a = torch.rand(n) * 3, torch.rand(n) * 6.2832
    noise = 0.1 * torch.randn(n, 4)
    return torch.cat([torch.stack([r * a.cos(), r * a.sin()], 1), noise], 1), r.long().clamp(max=2)


torch.manual_seed(3122)
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for i in range(70):
    x, y = rings(96)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 7 == 6:
        print(f"iter {i + 1:3d} | loss {loss.item():.4f}")
