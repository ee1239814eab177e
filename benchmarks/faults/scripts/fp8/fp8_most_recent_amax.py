"""Delayed FP8 scaling with amax_history_len=1, over two data sets in turn: each step uses the other's scale."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Recipe:
    amax_history_len: int = 1
    fwd: torch.dtype = torch.float8_e4m3fn
    bwd: torch.dtype = torch.float8_e5m2


class FP8Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, dtype, bwd):
        ctx.bwd = bwd
        top = torch.finfo(dtype).max
        return (x * scale).clamp(-top, top).to(dtype).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        top = torch.finfo(ctx.bwd).max
        scale = top / grad.abs().max().clamp(min=1e-30)
        return (grad * scale).to(ctx.bwd).to(grad.dtype) / scale, None, None, None


class FP8Linear(nn.Linear):
    def __init__(self, *args, recipe=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.recipe = recipe or Recipe()
        self.register_buffer("amax_history", torch.zeros(self.recipe.amax_history_len))

    def forward(self, x):
        r = self.recipe
        top = torch.finfo(r.fwd).max
        current = x.detach().abs().max()
        amax = self.amax_history.max()
        amax = torch.where(amax > 0, amax, current)
        x = FP8Cast.apply(x, top / amax, r.fwd, r.bwd)
        w = FP8Cast.apply(self.weight, top / self.weight.detach().abs().max(), r.fwd, r.bwd)
        if self.training:
            self.amax_history.copy_(self.amax_history.roll(1))
            self.amax_history[0] = current
        return F.linear(x, w, self.bias)


class Denoiser(nn.Module):
    def __init__(self, dim=40, hidden=96):
        super().__init__()
        self.inp = FP8Linear(dim, hidden)
        self.mid = FP8Linear(hidden, hidden)
        self.out = nn.Linear(hidden, dim)

    def forward(self, x):
        h = F.relu(self.inp(x))
        h = h + F.relu(self.mid(h))
        return self.out(h)


def speech(n):
    phase, pitch = torch.rand(n, 1) * 6.28, 0.2 + 0.3 * torch.rand(n, 1)
    return 0.3 * torch.sin(phase + pitch * torch.arange(40))


def music(n):
    return 12 * sum(speech(n) for _ in range(3))


torch.manual_seed(508)
model = Denoiser()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
loaders = [speech, music]
for step in range(200):
    clean = loaders[step % 2](64)
    level = clean.abs().max()
    noisy = clean + 0.1 * level * torch.randn_like(clean)
    loss = ((model(noisy) - clean) / level).square().mean()
    optimizer.zero_grad()
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 4 < 2:
        print(f"step {step} {loaders[step % 2].__name__} loss {loss.item():.5f} grad_norm {grad_norm:.3f}")
