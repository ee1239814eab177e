"""Linear layers whose operands pass through E4M3, with scales fixed by a calibration pass."""

import torch
from torch import nn

LARGEST = 448.0


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        inside = (x * scale).clamp(-LARGEST, LARGEST)
        return inside.to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Fp8Linear(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("scale", torch.tensor(1.0))
        self.calibrating = False

    def forward(self, x):
        if self.calibrating:
            self.scale.fill_(0.9 * LARGEST / x.detach().abs().amax().clamp(min=1e-6))
            return super().forward(x)
        weight_scale = LARGEST / self.weight.detach().abs().amax()
        x = _Through.apply(x, self.scale)
        return nn.functional.linear(x, _Through.apply(self.weight, weight_scale), self.bias)


@torch.no_grad()
def calibrate(model, batch):
    layers = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    for layer in layers:
        layer.calibrating = True
    model(batch)
    for layer in layers:
        layer.calibrating = False
