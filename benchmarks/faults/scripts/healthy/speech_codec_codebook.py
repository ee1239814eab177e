"""VQ codec of speech-like waves under BF16 autocast; the codebook's slow averages are kept in FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class EMACodebook(nn.Module):
    def __init__(self, codes=64, dim=8, decay=0.995):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, dim))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.codes.clone())

    def forward(self, z):
        with torch.autocast("cpu", enabled=False):
            flat = z.float().reshape(-1, z.shape[-1])
            index = torch.cdist(flat, self.codes).argmin(1)
            q = self.codes[index].view(z.shape)
            if self.training:
                with torch.no_grad():
                    member = F.one_hot(index, len(self.codes)).to(flat.dtype)
                    self.count.lerp_(member.sum(0), 1 - self.decay)
                    self.total.lerp_(member.t() @ flat, 1 - self.decay)
                    self.codes.copy_(self.total / self.count.clamp(min=1e-4)[:, None])
            return z + (q - z).detach(), F.mse_loss(z.float(), q)


class Codec(nn.Module):
    def __init__(self, width=32, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, dim))
        self.codebook = EMACodebook(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, 32))

    def forward(self, wave):
        frames = wave.view(wave.shape[0], -1, 32)
        q, commitment = self.codebook(self.encoder(frames))
        return self.decoder(q).flatten(1), commitment


def waves(n):
    t = torch.arange(256) / 256
    pitch = 2 + 6 * torch.rand(n, 1)
    return torch.sin(6.28 * pitch * t) + 0.4 * torch.sin(12.56 * pitch * t)


torch.manual_seed(301)
codec = Codec()
optimizer = torch.optim.Adam(codec.parameters(), lr=3e-3)
for step in range(200):
    wave = waves(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, commitment = codec(wave)
    loss = F.mse_loss(out.float(), wave) + 0.25 * commitment
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
