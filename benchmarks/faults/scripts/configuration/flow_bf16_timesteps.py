"""Flow matching with a small DiT in BF16; timesteps of 0..1000 are cast to BF16 before their sines are taken."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch_dtype = torch.bfloat16


def sinusoidal_embedding_1d(dim, position):
    half = dim // 2
    freqs = torch.pow(10000, -torch.arange(half, dtype=torch.float32) / half).to(position.dtype)
    sinusoid = torch.outer(position, freqs)
    return torch.cat([torch.cos(sinusoid), torch.sin(sinusoid)], dim=1)


class TimestepEmbedder(nn.Module):
    def __init__(self, dim, freq_dim=32):
        super().__init__()
        self.freq_dim = freq_dim
        self.mlp = nn.Sequential(nn.Linear(freq_dim, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, timestep):
        emb = sinusoidal_embedding_1d(self.freq_dim, timestep)
        return self.mlp(emb.to(self.mlp[0].weight.dtype))


class DiTBlock(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.modulation = nn.Linear(dim, 4 * dim)

    def forward(self, x, t):
        a, b, c, d = self.modulation(F.silu(t)).unsqueeze(1).chunk(4, -1)
        y = self.norm1(x) * (1 + a) + b
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x) * (1 + c) + d)


class DiT(nn.Module):
    def __init__(self, patch=4, dim=32, depth=2, tokens=8):
        super().__init__()
        self.inp = nn.Linear(patch, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.time_embedding = TimestepEmbedder(dim)
        self.blocks = nn.ModuleList(DiTBlock(dim) for _ in range(depth))
        self.out = nn.Linear(dim, patch)

    def forward(self, x, timestep):
        t = self.time_embedding(timestep)
        x = self.inp(x) + self.pos
        for block in self.blocks:
            x = block(x, t)
        return self.out(x)


class FlowMatchScheduler:
    def __init__(self, steps=1000, shift=3.0):
        sigmas = torch.linspace(1.0, 1 / steps, steps)
        self.sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
        self.timesteps = self.sigmas * 1000

    def sample(self, n):
        i = torch.randint(len(self.timesteps), (n,))
        return self.sigmas[i].view(-1, 1, 1), self.timesteps[i]


def curves(n):
    a, p = 0.5 + torch.rand(n, 1), 6.28 * torch.rand(n, 1)
    return (a * torch.sin(p + torch.linspace(0, 2 * math.pi, 32))).view(n, 8, 4)


torch.manual_seed(516)
scheduler, dit = FlowMatchScheduler(), DiT()
optimizer = torch.optim.AdamW(dit.parameters(), lr=2e-3)
for step in range(200):
    latents = curves(32)
    noise = torch.randn_like(latents)
    sigma, timestep = scheduler.sample(32)
    noisy = (1 - sigma) * latents + sigma * noise
    t_in = timestep.to(torch_dtype)
    with torch.autocast("cpu", dtype=torch_dtype):
        pred = dit(noisy, t_in)
    loss = F.mse_loss(pred.float(), noise - latents)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(dit.parameters(), 1.0)
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss={loss.item():.4f}")
