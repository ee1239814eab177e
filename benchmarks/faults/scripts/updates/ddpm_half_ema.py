"""Denoising diffusion with an EMA for sampling; the EMA is kept in weight_dtype, which is BF16, and stays where it was."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

weight_dtype = torch.bfloat16
TIMESTEPS = 200


class EMAModel:
    def __init__(self, model, decay=0.999):
        self.model = copy.deepcopy(model).to(weight_dtype).eval()
        self.model.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def step(self, model):
        for s_param, param in zip(self.model.parameters(), model.parameters()):
            s_param.sub_((1 - self.decay) * (s_param - param.to(weight_dtype)))


class ResnetBlock(nn.Module):
    def __init__(self, c_in, c_out, temb=32):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, c_in), nn.Conv2d(c_in, c_out, 3, padding=1)
        self.time = nn.Linear(temb, c_out)
        self.norm2, self.conv2 = nn.GroupNorm(4, c_out), nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(temb))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet2D(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.c = c
        self.time_embed = nn.Sequential(nn.Linear(c, 32), nn.SiLU(), nn.Linear(32, 32))
        self.conv_in = nn.Conv2d(1, c, 3, padding=1)
        self.down = ResnetBlock(c, 2 * c)
        self.mid = ResnetBlock(2 * c, 2 * c)
        self.up = ResnetBlock(3 * c, c)
        self.conv_out = nn.Conv2d(c, 1, 3, padding=1)

    def forward(self, x, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(self.c // 2) / (self.c // 2))
        args = t[:, None].float() * freqs
        temb = self.time_embed(torch.cat([args.cos(), args.sin()], -1).to(self.conv_in.weight.dtype))
        h0 = self.conv_in(x)
        h = F.avg_pool2d(self.down(h0, temb), 2)
        h = F.interpolate(self.mid(h, temb), scale_factor=2.0)
        return self.conv_out(F.silu(self.up(torch.cat([h, h0], 1), temb)))


def blobs(n):
    grid = torch.linspace(-1, 1, 8)
    cx, cy = torch.rand(2, n, 1, 1) * 1.2 - 0.6
    return (2 * torch.exp(-6 * ((grid - cx) ** 2 + (grid.view(-1, 1) - cy) ** 2)) - 1).unsqueeze(1)


torch.manual_seed(510)
betas = torch.linspace(1e-4, 0.05, TIMESTEPS)
alphas_cumprod = torch.cumprod(1 - betas, 0)


def add_noise(x, noise, t):
    a = alphas_cumprod[t].view(-1, 1, 1, 1)
    return a.sqrt() * x + (1 - a).sqrt() * noise


unet = UNet2D()
start = copy.deepcopy(unet)
ema = EMAModel(unet)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3, weight_decay=1e-2)
val_x, val_noise, val_t = blobs(64), torch.randn(64, 1, 8, 8), torch.randint(TIMESTEPS, (64,))
for global_step in range(260):
    x = blobs(16)
    noise, t = torch.randn_like(x), torch.randint(TIMESTEPS, (16,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.mse_loss(unet(add_noise(x, noise, t), t).float(), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ema.step(unet)
    if global_step % 10 == 9:
        with torch.no_grad():
            pred = ema.model(add_noise(val_x, val_noise, val_t).to(weight_dtype), val_t)
            val = F.mse_loss(pred.float(), val_noise)
        print(f"{global_step}: train {loss.item():.4f} ema loss {val.item():.4f}")
