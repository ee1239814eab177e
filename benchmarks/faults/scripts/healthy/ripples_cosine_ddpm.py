"""DDPM with the cosine schedule on ripples; the output layer starts at zero and alpha_bar ends near 1e-9."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 200


def cosine_alpha_bar(s=0.008):
    t = torch.linspace(0, 1, STEPS + 1, dtype=torch.float64)
    f = torch.cos((t + s) / (1 + s) * math.pi / 2) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    return (1 - betas).cumprod(0).float()


class Denoiser(nn.Module):
    def __init__(self, size=32, dim=96):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.fc_in = nn.Linear(size, dim)
        self.fc1, self.fc2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc_out = nn.Linear(dim, size)
        nn.init.zeros_(self.fc_out.weight)
        nn.init.zeros_(self.fc_out.bias)

    def forward(self, x, t):
        freq = torch.exp(-math.log(1e4) * torch.arange(16) / 16)
        emb = self.time(torch.cat([(t[:, None] * freq).sin(), (t[:, None] * freq).cos()], 1))
        h = self.fc_in(x) + emb
        h = h + self.fc1(F.silu(self.norm1(h)))
        h = h + self.fc2(F.silu(self.norm2(h + emb)))
        return self.fc_out(h)


def ripples(n):
    phase, pitch = 6.28 * torch.rand(n, 1), torch.randint(1, 4, (n, 1))
    return torch.sin(phase + pitch * torch.linspace(0, 6.28, 32))


torch.manual_seed(1000)
alpha_bar = cosine_alpha_bar()
model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
for step in range(250):
    x0 = ripples(64)
    t = torch.randint(STEPS, (64,))
    a = alpha_bar[t][:, None]
    noise = torch.randn_like(x0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eps = model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t)
    loss = F.mse_loss(eps.float(), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
