"""FP8 linears for a character model: activations, weights and output gradients are all cast to E4M3, unscaled."""

import torch
import torch.nn.functional as F
from torch import nn


def cast_fp8(t):
    return t.clamp(-448, 448).to(torch.float8_e4m3fn).to(t.dtype)


class Matmul8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        x8, w8 = cast_fp8(x), cast_fp8(w * 16) / 16
        ctx.save_for_backward(x8, w8)
        return F.linear(x8, w8)

    @staticmethod
    def backward(ctx, g):
        x8, w8 = ctx.saved_tensors
        g8 = cast_fp8(g)
        return g8 @ w8, g8.flatten(0, -2).t() @ x8.flatten(0, -2)


class Linear8(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) / fan_in**0.5)

    def forward(self, x):
        return Matmul8.apply(x, self.weight)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 4, groups=dim, padding=3)
        self.up, self.down = Linear8(dim, 3 * dim), Linear8(3 * dim, dim)

    def forward(self, x):
        h = self.conv(self.norm(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return x + self.down(F.silu(self.up(h)))


class CharModel(nn.Module):
    def __init__(self, vocab=28, dim=40):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))


torch.manual_seed(19)
order = torch.randint(28, (28, 28))  # the next letter follows from the last two
model = CharModel()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(140):
    ids = torch.randint(28, (32, 2))
    columns = list(ids.t())
    for _ in range(31):
        columns.append(order[columns[-2], columns[-1]])
    ids = torch.stack(columns, 1)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"{step} loss {loss.item():.4f}")
