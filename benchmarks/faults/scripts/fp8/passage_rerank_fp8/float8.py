"""Linear layers whose operands are rounded to float8 (e4m3) with one scale per tensor."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


class RoundToFloat8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        wide = (x * scale).clamp(-E4M3_MAX, E4M3_MAX)
        return wide.to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Float8Linear(nn.Linear):
    """Keeps the largest magnitudes of the last steps; the scales follow from them every ``interval`` steps."""

    def __init__(self, *args, interval=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.interval = interval
        self.calls = 0
        self.register_buffer("x_scale", torch.ones(()))
        self.register_buffer("w_scale", torch.ones(()))

    def forward(self, x):
        if self.training:
            if self.calls % self.interval == 0:
                self.x_scale.copy_(E4M3_MAX / x.detach().abs().max().clamp(min=1e-6))
                self.w_scale.copy_(E4M3_MAX / self.weight.detach().abs().max())
            self.calls += 1
        return F.linear(RoundToFloat8.apply(x, self.x_scale), RoundToFloat8.apply(self.weight, self.w_scale), self.bias)
