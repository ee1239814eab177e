"""Colours of lichen with a hinge GAN; the two players take turns and no loss falls for long."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 3), nn.Tanh()
        )

    def forward(self, z):
        return self.net(z)


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [3, 48, 48, 1]
        self.layers = nn.ModuleList(spectral_norm(nn.Linear(a, b)) for a, b in zip(sizes, sizes[1:]))

    def forward(self, c):
        for layer in self.layers[:-1]:
            c = nn.functional.leaky_relu(layer(c), 0.2)
        return self.layers[-1](3 * c)[:, 0]


def lichen(n):
    kind = torch.randint(4, (n, 1))
    hue = kind * 1.6 + 0.1 * torch.randn(n, 1)
    return 0.7 * torch.cat([torch.cos(hue), torch.sin(hue), torch.cos(2 * hue)], 1)


def main():
    torch.manual_seed(70)
    g, d = Painter(), Judge()
    og = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.0, 0.9))
    od = torch.optim.Adam(d.parameters(), lr=3e-3, betas=(0.0, 0.9))
    for step in range(150):
        real, fake = lichen(64), g(torch.randn(64, 6))
        judged = torch.relu(1 - d(real)).mean() + torch.relu(1 + d(fake.detach())).mean()
        od.zero_grad()
        judged.backward()
        od.step()
        painted = -d(g(torch.randn(64, 6))).mean()
        og.zero_grad()
        painted.backward()
        og.step()
        if step % 10 == 0:
            print(f"{step} judge {judged.item():.3f} painter loss {painted.item():.3f}")


if __name__ == "__main__":
    main()
