"""Perceiver over irregular sensor readings, checkpointed blocks, BF16 autocast. Missing readings are masked."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class CrossAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm_q, self.norm_kv = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, latents, readings, missing):
        q = self.split(self.q(self.norm_q(latents)))
        k, v = map(self.split, self.kv(self.norm_kv(readings)).chunk(2, -1))
        scores = q @ k.mT * (q.shape[-1] ** -0.5)
        scores = scores.masked_fill(missing[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class PerceiverBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.cross = CrossAttention(dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, latents, readings, missing):
        latents = latents + self.cross(latents, readings, missing)
        return latents + self.mlp(latents)


class Perceiver(nn.Module):
    def __init__(self, channels, dim=32, latents=6, depth=2):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, dim) * 0.02)
        self.lift = nn.Linear(channels, dim)
        self.blocks = nn.ModuleList(PerceiverBlock(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 1)

    def forward(self, readings, missing):
        x = self.lift(readings)
        z = self.latents.expand(len(x), -1, -1)
        for block in self.blocks:
            z = checkpoint(block, z, x, missing, use_reentrant=False)
        return self.head(z.mean(1)).squeeze(-1)


def day(generator, batch=16, length=20):
    """Readings of a day; a station's radio may be down for any of it."""
    x = torch.randn(batch, length, 3, generator=generator)
    y = x[..., 0].mean(1)
    uptime = torch.rand(batch, 1, generator=generator) ** 0.7
    missing = torch.rand(batch, length, generator=generator) > uptime
    return x.masked_fill(missing.unsqueeze(-1), 0.0), missing, y


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(31)
    model = Perceiver(channels=3)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(30):
        readings, missing, target = day(generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            predicted = model(readings, missing)
            loss = nn.functional.mse_loss(predicted.float(), target)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 5 == 0:
            print(f"{step:3d} mse {loss.item():.4f} missing {missing.float().mean().item():.2f}")


if __name__ == "__main__":
    main()
