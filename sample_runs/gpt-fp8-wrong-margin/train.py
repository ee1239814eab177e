"""The GPT of gpt-fp8-delayed, with the margin applied the wrong way round: scales are four times too large."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, STEPS = 48, 32, 2, 2, 16, 24
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MARGIN = 2  # binades kept free above the largest amax of the history


class Scaling(nn.Module):
    """The delayed scale of one operand: from the largest amax of the last steps."""

    def __init__(self, dtype, length=8):
        super().__init__()
        self.dtype, self.largest = dtype, torch.finfo(dtype).max
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("amax_history", torch.zeros(length))

    def quantise(self, x):
        if not self.amax_history.any():
            self.update(x)  # nothing is known of the first tensor but itself
        narrow = (x * self.scale).clamp(-self.largest, self.largest).to(self.dtype)
        wide = narrow.to(x.dtype) / self.scale
        self.update(x)
        return wide

    def update(self, x):
        self.amax_history.copy_(self.amax_history.roll(1))
        self.amax_history[0] = x.abs().amax()
        self.scale.copy_(self.largest / self.amax_history.amax().clamp_min(1e-12) * 2**MARGIN)


class FP8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        x, weight = layer.input.quantise(x), layer.kernel.quantise(weight)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = ctx.layer.gradient.quantise(gradient)
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2), None


class FP8Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.input, self.kernel, self.gradient = Scaling(E4M3), Scaling(E4M3), Scaling(E5M2)

    def forward(self, x):
        return FP8Product.apply(x, self.weight, self) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = FP8Linear(WIDTH, 3 * WIDTH)
        self.proj = FP8Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = FP8Linear(WIDTH, 4 * WIDTH)
        self.down = FP8Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position)))


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
for step in range(STEPS):
    tokens = (torch.randint(VOCABULARY, (8, 1)) + torch.arange(CONTEXT + 1)) % VOCABULARY
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
