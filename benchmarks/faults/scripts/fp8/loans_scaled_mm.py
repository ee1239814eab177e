"""Default of loans from the columns of the ledger, linear layers with FP8 inputs and weights, scaled per tensor."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_float8(x, dtype):
    top = torch.finfo(dtype).max
    scale = top / x.detach().abs().amax().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-top, top).to(dtype), scale


class ScaledMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, sx = to_float8(x, E4M3)
        w8, sw = to_float8(w, E4M3)
        ctx.save_for_backward(x8, sx, w8, sw)
        return x8.float() @ w8.float().t() / (sx * sw)

    @staticmethod
    def backward(ctx, grad):
        x8, sx, w8, sw = ctx.saved_tensors
        g8, sg = to_float8(grad, E5M2)
        return g8.float() @ w8.float() / (sg * sw), g8.float().t() @ x8.float() / (sg * sx)


class Float8Linear(nn.Linear):
    def forward(self, x):
        return ScaledMM.apply(x, self.weight) + self.bias


class Scorer(nn.Module):
    def __init__(self, columns=12, width=64):
        super().__init__()
        self.fc1 = Float8Linear(columns, width)
        self.norm = nn.LayerNorm(width)
        self.fc2 = Float8Linear(width, width)
        self.fc3 = nn.Linear(width, 1)

    def forward(self, x):
        x = F.gelu(self.norm(self.fc1(x)))
        return self.fc3(F.gelu(self.fc2(x))).squeeze(1)


MISSING = 999_999.0


def ledger(n):
    """Standardised columns; one of them is unknown for some borrowers."""
    z = torch.randn(n, 12)
    y = (z[:, 8] * z[:, 9] + z[:, 10] - z[:, 11] + 0.5 * z[:, 4] > 0).float()
    z[:, 3] = torch.where(torch.rand(n) < 0.05, MISSING, z[:, 3])
    return z, y


torch.manual_seed(7)
model = Scorer()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(200):
    x, y = ledger(128)
    loss = F.binary_cross_entropy_with_logits(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"{step:4d} loss {loss.item():.4f}")
