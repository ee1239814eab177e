"""A sequence model with a memory; its norms run in bfloat16, the rest in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(11)
CHANNELS, LENGTH, DIM = 6, 20, 40


def recordings(n):
    """Sensors drift slowly around a common level; the event is a small bump in one of them."""
    level = 80 + 8 * torch.randn(n, 1, 1)
    x = level + 0.15 * torch.randn(n, LENGTH, CHANNELS)
    sensor, start = torch.randint(CHANNELS, (n,)), torch.randint(LENGTH - 6, (n,))
    bump = F.one_hot(sensor, CHANNELS)[:, None] * ((torch.arange(LENGTH) - start[:, None]).abs() < 5)[..., None]
    return x + 0.25 * bump, sensor


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.value, self.query = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        k, v, q = F.elu(self.key(x)) + 1, self.value(x), F.elu(self.query(x)) + 1
        memory = torch.einsum("ntk,ntv->nkv", k, v)
        return torch.einsum("ntk,nkv->ntv", q, memory) / torch.einsum("ntk,nk->nt", q, k.sum(1))[..., None]


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class Model(nn.Module):
    def __init__(self, norm_dtype):
        super().__init__()
        self.norm_in = LayerNorm(CHANNELS).to(norm_dtype)
        self.embed = nn.Linear(CHANNELS, DIM)
        self.memory = Memory()
        self.norm1, self.norm2 = LayerNorm(DIM).to(norm_dtype), LayerNorm(DIM).to(norm_dtype)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.head = nn.Linear(DIM, CHANNELS)

    def forward(self, x):
        x = self.embed(self.norm_in(x))
        x = x + self.memory(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x.mean(1))


model = Model(norm_dtype=torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(250):
    x, sensor = recordings(64)
    loss = F.cross_entropy(model(x), sensor)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
