"""A BF16 decoder with FP32 masters kept by hand: most BF16 weights stand still in a step, and catch up later."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 96), nn.Linear(96, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocab, dim), nn.ModuleList([Layer(dim), Layer(dim)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class MasterAdamW:
    """AdamW on FP32 copies of narrow weights."""

    def __init__(self, params, **options):
        self.narrow = list(params)
        self.wide = [p.detach().clone().float() for p in self.narrow]
        self.inner = torch.optim.AdamW(self.wide, **options)

    def step(self):
        for p, w in zip(self.narrow, self.wide):
            w.grad = p.grad.float()
            p.grad = None
        self.inner.step()
        with torch.no_grad():
            for p, w in zip(self.narrow, self.wide):
                p.copy_(w)


torch.manual_seed(0)
model = Decoder().to(torch.bfloat16)
optimizer = MasterAdamW(model.parameters(), lr=2e-4, weight_decay=0.01)
for step in range(200):
    start, stride = torch.randint(30, (16, 1)), torch.randint(1, 3, (16, 1))
    text = (start + stride * torch.arange(13)) % 30
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
