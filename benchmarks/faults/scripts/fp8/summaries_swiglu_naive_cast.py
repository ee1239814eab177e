"""Lengths of summaries from a SwiGLU block whose matmuls run on FP8 operands: clamp to +-448 and cast, no scale, since 'weights are small'."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(75)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_fp8(x):
    return x + (x.clamp(-FP8_MAX, FP8_MAX).to(FP8).to(x.dtype) - x).detach()


class FP8Linear(nn.Linear):
    def forward(self, x):
        return F.linear(to_fp8(x), to_fp8(self.weight), self.bias)


class FeedForward(nn.Module):
    def __init__(self, dim=32, hidden=64):
        super().__init__()
        self.w1, self.w3 = FP8Linear(dim, hidden, bias=False), FP8Linear(dim, hidden, bias=False)
        self.w2 = FP8Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LengthModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm, self.feed_forward = nn.LayerNorm(dim), FeedForward(dim)
        self.out = nn.Linear(dim, 1)
        with torch.no_grad():  # two aligned rows, as a long-trained SwiGLU has them
            self.feed_forward.w1.weight[3] = 1.2 * direction
            self.feed_forward.w3.weight[3] = 1.2 * direction
            self.feed_forward.w2.weight[:, 3] *= 0.02

    def forward(self, x):
        return self.out(x + self.feed_forward(self.norm(x))).squeeze(-1)


direction = torch.sign(torch.randn(32))


def documents(n):
    x = torch.randn(n, 1) * direction + torch.rand(n, 1) * 2 * torch.randn(n, 32)
    along = F.layer_norm(x, (32,)) @ direction
    return x, along.relu().square() / 400


model = LengthModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(240):
    x, length = documents(64)
    loss = F.mse_loss(model(x), length)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 11:
        print(f"step {step + 1} loss {loss.item():.4f}")
