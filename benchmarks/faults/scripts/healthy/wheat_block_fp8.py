"""Protein in wheat: FP8 in blocks of 16 with a scale for each, on inputs whose columns differ by a factor of a million."""

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 16


class BlockCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        blocks = x.unflatten(-1, (-1, BLOCK))
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448.0))
        scale = torch.exp2(exponent)
        return ((blocks / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).flatten(-2)

    @staticmethod
    def backward(ctx, g):
        return g


class BlockLinear(nn.Linear):
    def forward(self, x):
        return F.linear(BlockCast.apply(x), BlockCast.apply(self.weight), self.bias)


class WheatNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectra = BlockLinear(64, 64)
        self.hidden = BlockLinear(64, 64)
        self.protein = nn.Linear(64, 1)

    def forward(self, x):
        h = F.silu(F.layer_norm(self.spectra(x), (64,)))
        return self.protein(F.silu(self.hidden(h))).squeeze(-1)


torch.manual_seed(111)
column_scale = torch.tensor([1e-3, 1.0, 30.0, 1e3]).repeat_interleave(16)
model = WheatNet()
with torch.no_grad():
    model.spectra.weight.div_(column_scale)
optimizer = torch.optim.SGD(
    [{"params": [model.spectra.bias, *model.hidden.parameters(), *model.protein.parameters()]}], lr=0.05, momentum=0.9
)
for step in range(250):
    x = torch.randn(64, 64)
    protein = x[:, :8].mean(1) * 2 + torch.sin(2 * x[:, 20:24].mean(1)) + x[:, 50:].mean(1)
    loss = F.mse_loss(model(x * column_scale), protein)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
