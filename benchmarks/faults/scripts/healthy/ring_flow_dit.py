"""Flow matching on ring-shaped data with a small DiT: adaLN-zero, zero output layer, warm-up, bfloat16 autocast."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(33)
TOKENS, DIM, WIDTH, STEPS, WARMUP = 6, 4, 48, 200, 40


def rings(n):
    angle = 2 * math.pi * torch.rand(n, 1, 1)
    k = torch.arange(1, TOKENS + 1).view(1, TOKENS, 1)
    phase = torch.arange(DIM).view(1, 1, DIM) * math.pi / 2
    return 1.4 * torch.sin(k * angle + phase) + 0.05 * torch.randn(n, TOKENS, DIM)


class DiTBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.modulation(F.silu(c))[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + s1) + b1
        x = x + g1 * self.attn(h, h, h, need_weights=False)[0]
        return x + g2 * self.mlp(self.norm2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(DIM, WIDTH)
        self.pos = nn.Parameter(0.1 * torch.randn(TOKENS, WIDTH))
        self.time = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(DiTBlock(WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, DIM)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x, t):
        angle = t[:, None] * torch.exp(torch.linspace(0, 4, 8))
        c = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        h = self.inp(x) + self.pos
        for block in self.blocks:
            h = block(h, c)
        return self.out(h)


model = DiT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / WARMUP))
for step in range(1, STEPS + 1):
    x, noise, t = rings(64), torch.randn(64, TOKENS, DIM), torch.rand(64)
    mixed = (1 - t)[:, None, None] * noise + t[:, None, None] * x
    with torch.autocast("cpu", dtype=torch.bfloat16):
        velocity = model(mixed, t)
    loss = F.mse_loss(velocity.float(), x - noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.1e}")
