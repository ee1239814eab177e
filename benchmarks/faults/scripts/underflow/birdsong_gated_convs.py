"""Which bird? Gated dilated convolutions on 16-bit samples."""

import numpy as np
import torch
from torch import nn


class GatedBlock(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.filter = nn.Conv1d(ch, ch, 2, dilation=dilation)
        self.gate = nn.Conv1d(ch, ch, 2, dilation=dilation)
        self.skip = nn.Conv1d(ch, ch, 1)

    def forward(self, x):
        y = torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x))
        return self.skip(y)


class BirdNet(nn.Module):
    def __init__(self, species=8, ch=8):
        super().__init__()
        self.front = nn.Conv1d(1, ch, 9, stride=4)
        self.block1 = GatedBlock(ch, 1)
        self.block2 = GatedBlock(ch, 2)
        self.head = nn.Linear(ch, species)

    def forward(self, x):
        x = self.front(x)
        x = self.block1(x)
        x = x[:, :, 2:] + self.block2(x)
        return self.head(x.abs().mean(2))


def recordings(rng, n, samples=240):
    species = rng.integers(0, 8, n)
    t = np.arange(samples)
    pitch = 0.15 + 0.07 * species + 0.02 * rng.standard_normal(n)
    song = np.sin(pitch[:, None] * t + rng.uniform(0, 6.28, n)[:, None]) + 0.5 * rng.standard_normal((n, samples))
    pcm = (np.clip(song / 3, -1, 1) * 32767).astype(np.int16)
    return torch.from_numpy(pcm), torch.from_numpy(species)


rng = np.random.default_rng(3)
torch.manual_seed(3)
net = BirdNet()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(200):
    pcm, species = recordings(rng, 32)
    waves = pcm.unsqueeze(1).float()
    loss = nn.functional.cross_entropy(net(waves), species)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("step", step, "loss %.4f" % loss.item())
