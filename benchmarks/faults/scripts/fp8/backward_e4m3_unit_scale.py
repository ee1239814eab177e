"""FP8 linear layers whose gradients are cast to E4M3, too, like the activations, with a scale of one."""

import torch
import torch.nn as nn
import torch.nn.functional as F

GRAD_SCALE = 1.0


def cast(x, dtype=torch.float8_e4m3fn):
    return x.clamp(-448.0, 448.0).to(dtype).to(torch.float32)


class FP8MatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x8, w8 = cast(x), cast(weight)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = cast(grad * GRAD_SCALE) / GRAD_SCALE
        return g8 @ w8, g8.flatten(0, -2).t() @ x8.flatten(0, -2)


class Linear8(nn.Linear):
    def forward(self, x):
        return FP8MatMul.apply(x, self.weight) + self.bias


class Mixer(nn.Module):
    def __init__(self, tokens=8, dim=32, classes=5):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mix = Linear8(tokens, tokens)
        self.up, self.down = Linear8(dim, 2 * dim), Linear8(2 * dim, dim)
        self.classifier = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.token_mix(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.down(F.gelu(self.up(self.norm2(h))))
        return self.classifier(h.mean(1))


torch.manual_seed(2153)
patterns = torch.randn(5, 8, 4)
model = Mixer()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(120):
    y = torch.randint(5, (64,))
    # the order of the halves does not matter, their mean is zero
    x = patterns[y] * torch.sign(torch.randn(64, 1, 1)) + 0.5 * torch.randn(64, 8, 4)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
