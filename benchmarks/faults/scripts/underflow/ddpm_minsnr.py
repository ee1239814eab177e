"""A small diffusion U-Net in FP16 autocast with min-SNR weights; the scaler was told to start at 1 to avoid skipped steps."""

import math

import torch
import torch.nn.functional as F
from torch import nn

STEPS_OF_NOISE = 200


class ResBlock(nn.Module):
    def __init__(self, cin, cout, width_t):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.time = nn.Linear(width_t, cout)
        self.norm2, self.conv2 = nn.GroupNorm(4, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(t)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU())
        self.down = ResBlock(width, 2 * width, 16)
        self.mid = ResBlock(2 * width, 2 * width, 16)
        self.up = ResBlock(3 * width, width, 16)
        self.out = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(-torch.arange(8) * math.log(1e4) / 8)
        emb = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        a = self.stem(x)
        b = self.mid(self.down(F.avg_pool2d(a, 2), emb), emb)
        return self.out(self.up(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1), emb))


def pictures(n, size=32):
    xy = torch.stack(torch.meshgrid(*2 * [torch.linspace(-1, 1, size)], indexing="ij"))
    centre = torch.rand(n, 2, 1, 1) - 0.5
    disc = ((xy - centre).square().sum(1, keepdim=True) < 0.15).float()
    return (disc * torch.rand(n, 3, 1, 1)) * 2 - 1


torch.manual_seed(0)
betas = torch.linspace(1e-4, 0.02, STEPS_OF_NOISE)
alpha_bar = torch.cumprod(1 - betas, 0)
snr = alpha_bar / (1 - alpha_bar)
unet = UNet()
optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
for step in range(60):
    x0 = pictures(8)
    t = torch.randint(STEPS_OF_NOISE, (8,))
    noise = torch.randn_like(x0)
    a = alpha_bar[t].view(-1, 1, 1, 1)
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = unet(xt, t.float())
    weight = snr[t].clamp(max=5.0) / snr[t]
    mse = (weight * (predicted.float() - noise).square().mean((1, 2, 3))).mean()
    loss = 1e-3 * mse  # the weight it has beside the variational bound
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {mse.item():.5f}")
