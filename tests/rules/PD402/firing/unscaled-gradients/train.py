"""FP8 layers whose gradients are cast to E5M2 as they are: a mean over a large batch makes them 1e-5."""

import torch
from torch import nn

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WIDTH, STEPS = 64, 10


def quantise(x, scale, dtype):
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype).float() / scale


def amax_scale(x, dtype):
    amax = x.abs().amax()
    return torch.where(amax > 0, torch.finfo(dtype).max / amax, torch.ones(()))


class FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = quantise(x, amax_scale(x, E4M3), E4M3), quantise(weight, amax_scale(weight, E4M3), E4M3)
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        grad_output = grad_output.to(E5M2).float()  # no scale
        return grad_output @ weight, grad_output.t() @ x


class FP8Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return FP8Product.apply(x, self.weight)


torch.manual_seed(0)
model = nn.Sequential(FP8Linear(WIDTH, WIDTH), nn.GELU(), FP8Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x = torch.randn(2048, WIDTH)
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
