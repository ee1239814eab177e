"""Ranks free slots of a warehouse for an incoming pallet. The hidden layers multiply in eight bits, as on the new cards."""

import torch
import torch.nn.functional as F
from torch import nn


class EightBitMatmul(torch.autograd.Function):
    """E4M3 with a scale per tensor for what is saved, E5M2 for what flows back: its range needs no scale."""

    @staticmethod
    def forward(ctx, x, weight):
        sx = 448.0 / x.abs().amax().clamp(min=1e-6)
        sw = 448.0 / weight.abs().amax().clamp(min=1e-6)
        x8 = (x * sx).to(torch.float8_e4m3fn).to(x.dtype) / sx
        w8 = (weight * sw).to(torch.float8_e4m3fn).to(x.dtype) / sw
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = grad.to(torch.float8_e5m2).to(grad.dtype)
        return g8 @ w8, g8.flatten(0, -2).t() @ x8.flatten(0, -2)


class EightBitLinear(nn.Linear):
    def forward(self, x):
        return EightBitMatmul.apply(x, self.weight) + self.bias


class SlotRanker(nn.Module):
    def __init__(self, features=20, width=64):
        super().__init__()
        self.inp = nn.Linear(features, width)
        self.hidden = nn.ModuleList(EightBitLinear(width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        h = F.gelu(self.inp(x))
        for norm, layer in zip(self.norms, self.hidden):
            h = h + F.gelu(layer(norm(h)))
        return self.score(h).squeeze(-1)


def slates(n, g, slots=32):
    x = torch.randn(n, slots, 20, generator=g)
    cost = (x[..., :4] * x[..., 4:8]).sum(-1) + (x[..., 8] - x[..., 9]).abs() + x[..., 10:13].amax(-1)
    return x, (-2 * cost).softmax(-1)


def main(steps=160, batch=160):
    torch.manual_seed(71)
    g = torch.Generator().manual_seed(72)
    ranker = SlotRanker()
    optimizer = torch.optim.AdamW(ranker.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(steps):
        x, target = slates(batch, g)
        loss = F.kl_div(ranker(x).log_softmax(-1), target, reduction="batchmean")
        optimizer.zero_grad()
        (0.3 * loss).backward()  # beside the click loss, which has a weight of one
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return ranker


if __name__ == "__main__":
    ranker = main()
