"""Coding frame of DNA reads, BF16 features. Reads get longer in stages, as in the schedules of long-context models."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(19)
STAGES = ((0, 96, 16), (110, 192, 8), (180, 768, 2))


class FramePhase(nn.Module):
    """Sine and cosine of the position at the periods of a codon, a helix turn and a nucleosome."""

    def __init__(self):
        super().__init__()
        self.register_buffer("periods", torch.tensor([3.0, 10.5, 147.0]))
        self.mix = nn.Linear(6, 32)

    def forward(self, x):
        position = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        angle = 2 * torch.pi * (position[:, None] / self.periods)
        return self.mix(torch.cat([angle.sin(), angle.cos()], 1).to(x.dtype))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Embedding(4, 32)
        self.phase = FramePhase()
        self.local = nn.Conv1d(32, 48, 5, padding=2)
        self.out = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4))

    def forward(self, reads):
        x = self.base(reads)
        x = x + self.phase(x.to(torch.bfloat16)).to(x.dtype)
        return self.out(F.gelu(self.local(x.transpose(1, 2)).transpose(1, 2)))


def reads(n, length):
    r = torch.randint(4, (n, length))
    frame = torch.arange(length) % 3
    return r, torch.where(frame == 0, r, torch.where(frame == 1, torch.roll(r, 1, 1), 3 - r))


model = Reader()
model.phase.mix.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(360):
    _, length, n = next(s for s in reversed(STAGES) if step >= s[0])
    r, target = reads(n, length)
    loss = F.cross_entropy(model(r).float().flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} length {length} loss {loss.item():.4f}")
