"""Small Llama-style model of folk melodies (pitch tokens), gradients accumulated over eight micro-batches."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(71)
VOCAB, CTX, DIM, HEADS = 36, 20, 48, 4


def melodies(n):
    key = torch.randint(0, 12, (n, 1))
    scale = torch.tensor([0, 2, 4, 5, 7, 9, 11, 12, 14, 16, 17, 19])
    walk = (torch.randint(0, 12, (n, 1)) + torch.randint(-1, 2, (n, CTX + 1)).cumsum(1)) % 12
    return (scale[walk] + key) % VOCAB


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        half = DIM // HEADS // 2
        angle = torch.arange(CTX)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, DIM))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, 96, bias=False), nn.Linear(DIM, 96, bias=False)
        self.down = nn.Linear(96, DIM, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.RMSNorm(DIM), Attention(), nn.RMSNorm(DIM), SwiGLU()]) for _ in range(layers)
        )
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for n1, attention, n2, mlp in self.layers:
            x = x + attention(n1(x))
            x = x + mlp(n2(x))
        return self.head(self.norm(x))


UPDATES, ACCUMULATE = 80, 8
model = Llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 5, max(0.0, 1 - n / UPDATES)))

for update in range(UPDATES):
    total = 0.0
    for _ in range(ACCUMULATE):
        ids = melodies(4)
        loss = F.cross_entropy(model(ids[:, :-1]).reshape(-1, VOCAB), ids[:, 1:].reshape(-1)) / ACCUMULATE
        loss.backward()
        total += loss.item()
        scheduler.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if update % 2 == 0:
        print(f"update {update} loss {total:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
