"""Sonar echoes; dense layers in FP8 with current per-tensor scales, E4M3 forward and E5M2 backward."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def quantise(t, dtype):
    top = torch.finfo(dtype).max
    scale = torch.exp2(torch.floor(torch.log2(top / t.abs().amax().clamp(min=1e-20))))
    return (t * scale).clamp(-top, top).to(dtype).to(t.dtype) / scale


class FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = quantise(x, torch.float8_e4m3fn), quantise(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = quantise(grad, torch.float8_e5m2)
        return g8 @ w8, g8.flatten(0, -2).t() @ x8.flatten(0, -2)


class FP8Linear(nn.Linear):
    def forward(self, x):
        return FP8Product.apply(x, self.weight) + self.bias


class MinimalRecurrent(nn.Module):
    def __init__(self, n_in, hidden):
        super().__init__()
        self.gate, self.state = FP8Linear(n_in, hidden), FP8Linear(n_in, hidden)

    def forward(self, x):
        z, candidate = torch.sigmoid(self.gate(x)), torch.tanh(self.state(x))
        h = torch.zeros_like(z[:, 0])
        for t in range(x.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * candidate[:, t]
        return h


class Sonar(nn.Module):
    def __init__(self, bands=16, hidden=64, objects=5):
        super().__init__()
        self.front = FP8Linear(bands, hidden)
        self.rnn = MinimalRecurrent(hidden, hidden)
        self.out = nn.Linear(hidden, objects)

    def forward(self, x):
        return self.out(self.rnn(F.relu(self.front(x))))


torch.manual_seed(92)
echo = torch.randn(5, 8, 16)
model = Sonar()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(100):
    y = torch.randint(0, 5, (64,))
    loss = F.cross_entropy(model(echo[y] + 1.5 * torch.randn(64, 8, 16)), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
