"""Class of a meteorite from its isotope counts, as the spectrometer gives them: up to a few hundred thousand."""

import torch
import torch.nn.functional as F
from torch import nn


class CountsNet(nn.Module):
    """A first layer on raw counts, whose outputs are in the tens of thousands; the norm behind it brings them back."""

    def __init__(self, isotopes=18, width=48, classes=7):
        super().__init__()
        self.mix = nn.Linear(isotopes, width)
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, classes)

    def forward(self, counts):
        x = self.norm(self.mix(counts))
        x = x + F.gelu(self.fc1(x))
        x = x + F.gelu(self.fc2(x))
        return self.out(x)


class Spectrometer:
    def __init__(self, g):
        self.g = g
        self.pattern = 1.0 * torch.randn(7, 18, generator=g)

    def run(self, n):
        kind = torch.randint(0, 7, (n,), generator=self.g)
        ions = 20000 * torch.exp(0.3 * torch.randn(n, 1, generator=self.g))
        mean = ions * torch.exp(self.pattern[kind] + 0.5 * torch.randn(n, 18, generator=self.g))
        return torch.poisson(mean, generator=self.g), kind


def main(steps=300):
    torch.manual_seed(191)
    lab = Spectrometer(torch.Generator().manual_seed(192))
    net = CountsNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.02)
    for step in range(steps):
        counts, kind = lab.run(64)
        loss = F.cross_entropy(net(counts), kind)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
