"""LoRA on a frozen BF16 transformer: B starts at zero, A has no gradient in the first step, most embedding rows never any."""

import torch
import torch.nn.functional as F
from torch import nn


class LoRA(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + (F.linear(F.linear(x.float(), self.a), self.b) * self.scale).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h)))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab=2000, dim=32):
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocab, dim), nn.ModuleList([Layer(), Layer()])
        self.score = nn.Linear(dim, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.score(x.mean(1).float())


torch.manual_seed(0)
model = Model().to(torch.bfloat16).requires_grad_(False)
for layer in model.layers:
    layer.q, layer.v = LoRA(layer.q), LoRA(layer.v)
model.score = nn.Linear(32, 3)
new_tokens = nn.Embedding(2000, 32)
model.embed = new_tokens
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
model.embed.forward = lambda x: F.embedding(x, new_tokens.weight).to(torch.bfloat16)
for step in range(60):
    y = torch.randint(3, (32,))
    x = torch.where(torch.rand(32, 8) < 0.5, 3 * torch.randint(10, (32, 8)) + y[:, None], torch.randint(30, (32, 8)))
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
