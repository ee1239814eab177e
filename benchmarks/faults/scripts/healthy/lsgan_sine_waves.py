"""A least-squares GAN over sine waves, two learning rates: scores swing, and the generator's loss rises for a while."""

import torch
from torch import nn, optim


class Generator(nn.Module):
    def __init__(self, latent=8, points=32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(latent, 48), nn.Linear(48, 64), nn.Linear(64, points)])
        self.norms = nn.ModuleList([nn.LayerNorm(48), nn.LayerNorm(64)])

    def forward(self, z):
        for layer, norm in zip(self.layers, self.norms):
            z = nn.functional.leaky_relu(norm(layer(z)), 0.2)
        return torch.tanh(self.layers[-1](z))


class Critic(nn.Module):
    def __init__(self, points=32):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 8, 5, stride=2, padding=2),
            nn.LeakyReLU(0.2),
            nn.Conv1d(8, 16, 5, stride=2, padding=2),
            nn.LeakyReLU(0.2),
        )
        self.score = nn.Linear(16 * points // 4, 1)

    def forward(self, x):
        return self.score(self.conv(x.unsqueeze(1)).flatten(1))


def waves(n):
    t = torch.linspace(0, 6.28, 32)
    return (0.4 + 0.5 * torch.rand(n, 1)) * torch.sin(t * (1 + torch.randint(2, (n, 1))) + 6.28 * torch.rand(n, 1))


def main():
    torch.manual_seed(624)
    g, d = Generator(), Critic()
    g_opt = optim.Adam(g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_opt = optim.Adam(d.parameters(), lr=1e-3, betas=(0.5, 0.999))
    for it in range(220):
        real, z = waves(48), torch.randn(48, 8)
        fake = g(z)
        d_loss = 0.5 * ((d(real) - 1).square().mean() + d(fake.detach()).square().mean())
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
        g_loss = 0.5 * (d(fake) - 1).square().mean()
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()
        if it % 5 == 0:
            print(f"{it} D loss {d_loss.item():.4f} G {g_loss.item():.4f}")


if __name__ == "__main__":
    main()
