"""Denoising autoencoder on audio-like frames in 16-bit PCM units; FP16 autocast."""

import torch
from torch import nn


class Loudness(nn.Module):
    """Log energy of each frame, so that the code need not carry it."""

    def forward(self, h):
        return torch.log1p((h * h).mean(-1, keepdim=True))


class DenoisingAutoencoder(nn.Module):
    def __init__(self, frame=64, code=12):
        super().__init__()
        self.enter = nn.Linear(frame, 48)
        self.loudness = Loudness()
        self.encode = nn.Sequential(nn.LayerNorm(48), nn.GELU(), nn.Linear(48, code))
        self.decode = nn.Sequential(nn.Linear(code + 1, 48), nn.GELU(), nn.Linear(48, frame))

    def forward(self, x):
        h = self.enter(x)
        return self.decode(torch.cat([self.encode(h), self.loudness(h)], -1))


def frames(loudness, n=16, size=64):
    t = torch.arange(size) / size
    pitch = torch.randint(1, 9, (n, 1))
    return loudness * torch.sin(6.2832 * pitch * t + torch.rand(n, 1))


def run(steps=18):
    torch.manual_seed(0)
    net = DenoisingAutoencoder()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for step in range(steps):
        clean = frames(loudness=25.0 * 1.3**step)  # quiet recordings come first in the archive
        noisy = clean + 0.05 * clean.std() * torch.randn_like(clean)
        with torch.autocast("cpu", dtype=torch.float16):
            restored = net(noisy)
        loss = nn.functional.mse_loss(restored.float(), clean / clean.std())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if step % 3 == 0:
            print(f"[{step:02d}] loss={loss.item():.4f} scale={scaler.get_scale():g}")


run()
