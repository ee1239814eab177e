"""A state-space sequence model with E4M3 weights and activations; the loader of one projection stores the scale's inverse."""

import torch
import torch.nn.functional as F
from torch import nn

TOP = 448.0


class Cast8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-TOP, TOP).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Proj8(nn.Module):
    def __init__(self, cin, cout, inverse=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cout, cin) / cin**0.5)
        self.inverse = inverse

    def scale_of(self, x):
        scale = TOP / x.detach().abs().max().clamp(min=1e-6)
        return 1 / scale if self.inverse else scale

    def forward(self, x):
        x = Cast8.apply(x, TOP / x.detach().abs().max().clamp(min=1e-6))
        return F.linear(x, Cast8.apply(self.weight, self.scale_of(self.weight)))


class Scan(nn.Module):
    def __init__(self, dim=24, state=32):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.proj_in, self.proj_out = Proj8(dim, state), Proj8(state, dim, inverse=True)
        self.decay = nn.Parameter(torch.linspace(-1, 3, state))

    def forward(self, x):
        u, a = self.proj_in(self.norm(x)), torch.sigmoid(self.decay)
        h, out = torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = a * h + (1 - a) * u[:, t]
            out.append(h)
        return x + self.proj_out(torch.tanh(torch.stack(out, 1)))


class SSM(nn.Module):
    def __init__(self, vocab=12, dim=24):
        super().__init__()
        self.embed, self.scan, self.head = nn.Embedding(vocab, dim), Scan(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.scan(self.embed(x)))


torch.manual_seed(8)
model = SSM()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(100):
    x = torch.randint(12, (24, 12))
    y = x.cumsum(1).roll(1, 1) % 2 + (x > 5).long()
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
