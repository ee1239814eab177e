"""ViT with emulated FP8 layers and a delayed-scaling recipe in the manner of Transformer Engine."""

import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 16
    amax_history_len: int = 16
    fp8_max: float = 448.0

    def scale(self, history):
        amax = history.max()
        return torch.where(amax > 0, self.fp8_max / amax / 2.0**self.margin, torch.ones(()))


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class TELinear(nn.Module):
    def __init__(self, n_in, n_out, recipe):
        super().__init__()
        self.recipe = recipe
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.register_buffer("amax_x", torch.zeros(recipe.amax_history_len))
        self.register_buffer("amax_w", torch.zeros(recipe.amax_history_len))

    def record(self, history, tensor):
        history.copy_(history.roll(1))
        history[0] = tensor.detach().abs().max()

    def forward(self, x):
        self.record(self.amax_x, x)
        self.record(self.amax_w, self.weight)
        x = Quantise.apply(x, self.recipe.scale(self.amax_x))
        w = Quantise.apply(self.weight, self.recipe.scale(self.amax_w))
        return F.linear(x, w, self.bias)


class Block(nn.Module):
    def __init__(self, dim, recipe, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.qkv, self.proj = nn.LayerNorm(dim), TELinear(dim, 3 * dim, recipe), TELinear(dim, dim, recipe)
        self.ln2, self.up, self.down = nn.LayerNorm(dim), TELinear(dim, 2 * dim, recipe), TELinear(2 * dim, dim, recipe)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class ViT(nn.Module):
    def __init__(self, recipe, dim=32, classes=6):
        super().__init__()
        self.patch = nn.Linear(16, dim)
        self.pos = nn.Parameter(torch.randn(9, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim, recipe) for _ in range(2))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = x.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(x), 9, 16)
        x = self.patch(x) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


torch.manual_seed(14)
motif = torch.randn(6, 12, 12)
model = ViT(DelayedScaling())
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(100):
    y = torch.randint(0, 6, (32,))
    x = motif[y] * torch.randn(32, 1, 1).sign() + 0.5 * torch.randn(32, 12, 12)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"step {step:3d} loss {loss.item():.4f}")
