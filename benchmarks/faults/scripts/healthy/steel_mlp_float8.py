"""Strength of steel from its composition, with the hidden layers in float8 and scales taken from each tensor."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(28)
ALLOYS, ELEMENTS, WIDTH = 2048, 12, 96


def round_to(x, dtype):
    scale = torch.finfo(dtype).max / x.abs().amax().clamp(min=1e-12)
    return (x * scale).to(dtype).to(x.dtype) / scale


class Float8Matmul(torch.autograd.Function):
    """Operands in e4m3, gradients in e5m2, each with the scale of its own maximum."""

    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = round_to(x, torch.float8_e4m3fn), round_to(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.T

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = round_to(grad, torch.float8_e5m2)
        return g8 @ w8, g8.T @ x8


class Float8Linear(nn.Linear):
    def forward(self, x):
        return Float8Matmul.apply(x, self.weight) + self.bias


class StrengthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(ELEMENTS, WIDTH)
        self.hidden = nn.ModuleList(Float8Linear(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.inp(x)
        for norm, layer in zip(self.norms, self.hidden):
            h = h + F.gelu(layer(norm(h)))
        return self.out(h)[:, 0]


x = torch.rand(ALLOYS, ELEMENTS)
strength = 2 * x[:, 0] + torch.sin(5 * x[:, 1]) + 3 * (x[:, 2] - 0.5) * (x[:, 3] - 0.5) + 0.05 * torch.randn(ALLOYS)
strength = (strength - strength.mean()) / strength.std()
model = StrengthNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(10):
    total, batches = 0.0, torch.randperm(1792).split(64)
    for idx in batches:
        loss = F.mse_loss(model(x[idx]), strength[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    with torch.no_grad():
        val = F.mse_loss(model(x[1792:]), strength[1792:]).item()
    print(f"epoch {epoch} train {total / len(batches):.4f} val loss {val:.4f}")
