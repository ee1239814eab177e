"""DDPM on two-dimensional swiss-roll points, gradient checkpointing in the denoiser."""

import torch
from schedule import linear_betas
from torch import nn
from torch.utils.checkpoint import checkpoint


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.time = nn.Embedding(100, width)
        self.enter = nn.Linear(2, width)
        self.middle = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(3)
        )
        self.leave = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.enter(x) + self.time(t)
        for layer in self.middle:
            h = h + checkpoint(layer, h, use_reentrant=False)
        return self.leave(h)


class GaussianDiffusion(nn.Module):
    def __init__(self, denoiser, betas):
        super().__init__()
        self.denoiser = denoiser
        alpha_bar = torch.cumprod(1 - betas, 0)
        self.register_buffer("alpha_bar", alpha_bar)

    def q_sample(self, x0, t, noise):
        a = self.alpha_bar[t].unsqueeze(-1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    def forward(self, x0, t):
        noise = torch.randn_like(x0)
        predicted = self.denoiser(self.q_sample(x0, t, noise), t)
        return (predicted - noise).square().mean()


def swiss_roll(n):
    angle = 4.5 * torch.rand(n) + 3.0
    return torch.stack([angle * angle.cos(), angle * angle.sin()], 1) / 7


def main():
    torch.manual_seed(5)
    diffusion = GaussianDiffusion(Denoiser(), linear_betas(100))
    optimizer = torch.optim.AdamW(diffusion.parameters(), lr=2e-3)
    for step in range(24):
        t = torch.randint(0, 100, (8,))
        loss = diffusion(swiss_roll(8), t)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            print(step, loss.detach())


if __name__ == "__main__":
    main()
