"""Diffusion over short sequences of latent frames, EDM preconditioning, a noise level per frame; clean context later on."""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

FRAMES, DIM = 8, 12
SIGMA_DATA = 0.5


class NoiseEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-math.log(1000.0) * torch.arange(width // 2) / (width // 2)) * 8)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU())

    def forward(self, c_noise):
        args = c_noise.unsqueeze(-1) * self.freqs
        return self.mlp(torch.cat([args.cos(), args.sin()], -1))


class FrameTransformer(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(DIM, width)
        self.noise = NoiseEmbedding(width)
        self.pos = nn.Parameter(0.02 * torch.randn(FRAMES, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.out = nn.Linear(width, DIM)

    def forward(self, x, c_noise):
        h = self.inp(x) + self.noise(c_noise) + self.pos
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False)
        return self.out(h)


class EDMPrecond(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, sigma):
        s = sigma.unsqueeze(-1)
        c_skip = SIGMA_DATA**2 / (s**2 + SIGMA_DATA**2)
        c_out = s * SIGMA_DATA / (s**2 + SIGMA_DATA**2).sqrt()
        c_in = 1 / (SIGMA_DATA**2 + s**2).sqrt()
        c_noise = sigma.log() / 4
        return c_skip * x + c_out * self.net(c_in * x, c_noise)


def clips(n):
    phase, speed = torch.rand(n, 1, 1) * 6.28, torch.rand(n, 1, 1) + 0.3
    t = torch.arange(FRAMES).view(1, -1, 1)
    return SIGMA_DATA * 1.4 * torch.sin(phase + speed * t + torch.linspace(0, 3, DIM))


def training_loss(model, x, context):
    sigma = (torch.randn(x.shape[:2]) * 1.2 - 1.2).exp()
    sigma[:, :context] = 0.0  # context frames are given clean
    noised = x + sigma.unsqueeze(-1) * torch.randn_like(x)
    denoised = model(noised, sigma)[:, context:]
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    return (weight[:, context:, None] * (denoised - x[:, context:]) ** 2).mean()


torch.manual_seed(23)
model = EDMPrecond(FrameTransformer())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
ema = {k: v.clone() for k, v in model.state_dict().items()}
for it in range(24):
    context = 0 if it < 10 else int(torch.randint(0, 4, ()))  # unconditional first, then with context
    loss = training_loss(model, clips(16), context)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for k, v in model.state_dict().items():
            ema[k].lerp_(v, 0.05)
    if it % 4 == 0:
        print(f"it {it:3d} context {context} loss {loss.item():.4f}")
