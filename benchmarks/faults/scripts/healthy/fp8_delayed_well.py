"""An MLP denoiser in FP8 with delayed scaling done well: a history of 16, a margin of one binade, E5M2 gradients."""

import torch
import torch.nn.functional as F
from torch import nn


class Delayed:
    def __init__(self, dtype, history=16, margin=1):
        self.dtype, self.history, self.margin, self.amaxes = dtype, history, margin, []

    def __call__(self, x):
        top = torch.finfo(self.dtype).max
        self.amaxes = [*self.amaxes, float(x.detach().abs().max())][-self.history :]
        # the newest one counts in the first step only; afterwards those before it
        amax = max(self.amaxes[:-1] or self.amaxes) or 1.0
        scale = 2.0 ** (torch.tensor(top / amax).log2().floor().item() - self.margin)
        return (x * scale).clamp(-top, top).to(self.dtype).to(x.dtype) / scale


class Product8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, scales):
        x, w = scales[0](x), scales[1](w)
        ctx.save_for_backward(x, w)
        ctx.scale = scales[2]
        return x @ w.T

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = ctx.scale(grad)
        return grad @ w, grad.T @ x, None


class Linear8(nn.Linear):
    def __init__(self, cin, cout):
        super().__init__(cin, cout)
        self.scales = [Delayed(d) for d in (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)]

    def forward(self, x):
        return Product8.apply(x, self.weight, self.scales) + self.bias


class Denoiser(nn.Module):
    def __init__(self, features=24, dim=64):
        super().__init__()
        self.inp = nn.Linear(features, dim)
        self.norm1, self.fc1 = nn.LayerNorm(dim), Linear8(dim, dim)
        self.norm2, self.fc2 = nn.LayerNorm(dim), Linear8(dim, dim)
        self.out = nn.Linear(dim, features)

    def forward(self, x):
        x = self.inp(x)
        x = x + F.gelu(self.fc1(self.norm1(x)))
        x = x + F.gelu(self.fc2(self.norm2(x)))
        return self.out(x)


torch.manual_seed(9)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
basis = torch.randn(4, 24)
for step in range(120):
    clean = torch.randn(64, 4) @ basis
    loss = F.mse_loss(model(clean + torch.randn(64, 24)), clean)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
