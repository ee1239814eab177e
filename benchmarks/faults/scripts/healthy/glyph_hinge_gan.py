"""8x8 glyphs from a GAN with hinge loss, spectral norm in the critic and betas (0, 0.9)."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(211)


def glyphs(n):
    image = torch.full((n, 8, 8), -1.0)
    row, col = torch.randint(1, 7, (2, n))
    kind = torch.rand(n) < 0.5
    index = torch.arange(n)
    image[index[kind], row[kind]] = 1.0
    image[index, :, col] = 1.0
    return image.unsqueeze(1) + 0.05 * torch.randn(n, 1, 8, 8)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 32 * 4)
        self.norm1, self.norm2 = nn.BatchNorm2d(32), nn.BatchNorm2d(16)
        self.up1, self.up2 = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ConvTranspose2d(16, 1, 4, 2, 1)

    def forward(self, z):
        h = F.relu(self.norm1(self.fc(z).view(-1, 32, 2, 2)))
        return torch.tanh(self.up2(F.relu(self.norm2(self.up1(h)))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = spectral_norm(nn.Conv2d(1, 16, 4, 2, 1)), spectral_norm(nn.Conv2d(16, 32, 4, 2, 1))
        self.fc = spectral_norm(nn.Linear(128, 1))

    def forward(self, x):
        h = F.leaky_relu(self.c2(F.leaky_relu(self.c1(x), 0.2)), 0.2)
        return self.fc(h.flatten(1)).squeeze(1)


g, d = Generator(), Critic()
opt_g = torch.optim.Adam(g.parameters(), lr=5e-4, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.0, 0.9))
for step in range(100):
    fake = g(torch.randn(32, 16))
    d_value = F.relu(1 - d(glyphs(32))).mean() + F.relu(1 + d(fake.detach())).mean()
    opt_d.zero_grad()
    d_value.backward()
    opt_d.step()
    loss = -d(g(torch.randn(32, 16))).mean()
    opt_g.zero_grad()
    loss.backward()
    opt_g.step()
    if step % 5 == 0:
        print(f"step {step} critic {d_value.item():.3f} generator loss {loss.item():.3f}")
