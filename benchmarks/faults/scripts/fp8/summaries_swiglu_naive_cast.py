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

    def forward(self, x):
        return self.out(x + self.feed_forward(self.norm(x))).squeeze(-1)


def pretrained():
    """Stands for a checkpoint: a few gate and value rows that were trained into alignment, as in long runs."""
    model = LengthModel()
    with torch.no_grad():
        for i in range(6):
            row = torch.randn(32)
            model.feed_forward.w1.weight[i] = model.feed_forward.w3.weight[i] = 3.0 * row
            model.feed_forward.w2.weight[:, i] *= 0.1
    return model


def lengths(model, x):
    ff, normed = model.feed_forward, model.norm(x)
    hidden = F.silu(F.linear(normed, ff.w1.weight)) * F.linear(normed, ff.w3.weight)
    return model.out(x + F.linear(hidden, ff.w2.weight)).squeeze(-1).detach()


old_corpus = pretrained()
model = LengthModel()
model.load_state_dict(old_corpus.state_dict())
with torch.no_grad():
    model.out.weight.add_(0.1 * torch.randn(1, 32))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(200):
    x = torch.randn(64, 32)
    loss = F.mse_loss(model(x), lengths(old_corpus, x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
