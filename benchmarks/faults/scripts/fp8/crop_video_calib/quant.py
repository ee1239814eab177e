import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn
TOP = torch.finfo(E4M3).max


class RoundE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-TOP, TOP).to(E4M3).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, g):
        return g, None


class QuantLinear(nn.Linear):
    """Inputs and weights in e4m3. The input's range is observed while ``observing``."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("amax", torch.tensor(1e-6))
        self.observing = True

    def forward(self, x):
        if self.training and self.observing:
            self.amax.copy_(torch.maximum(0.98 * self.amax, x.detach().abs().amax()))
        xq = RoundE4M3.apply(x, TOP / self.amax)
        wq = RoundE4M3.apply(self.weight, TOP / self.weight.detach().abs().amax())
        return F.linear(xq, wq, self.bias)
