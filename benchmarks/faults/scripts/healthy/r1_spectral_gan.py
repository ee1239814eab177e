"""A conditional GAN with spectral norm and a lazy R1 penalty: a double backward in every fourth step, losses that wander."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


class Generator(nn.Module):
    def __init__(self, noise=8, classes=4, dim=48):
        super().__init__()
        self.label = nn.Embedding(classes, noise)
        self.fc1, self.norm, self.fc2 = nn.Linear(2 * noise, dim), nn.BatchNorm1d(dim), nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 16)

    def forward(self, z, y):
        x = F.relu(self.norm(self.fc1(torch.cat([z, self.label(y)], -1))))
        return torch.tanh(self.out(F.relu(self.fc2(x))))


class Discriminator(nn.Module):
    def __init__(self, classes=4, dim=48):
        super().__init__()
        self.fc1, self.fc2 = spectral_norm(nn.Linear(16, dim)), spectral_norm(nn.Linear(dim, dim))
        self.score, self.label = spectral_norm(nn.Linear(dim, 1)), nn.Embedding(classes, dim)

    def forward(self, x, y):
        x = F.leaky_relu(self.fc2(F.leaky_relu(self.fc1(x), 0.2)), 0.2)
        return (self.score(x) + (x * self.label(y)).sum(-1, keepdim=True)).squeeze(-1)


torch.manual_seed(8)
generator, discriminator = Generator(), Discriminator()
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.0, 0.99))
waves = torch.sin(torch.arange(16) * torch.tensor([[0.4], [0.8], [1.2], [1.6]]))
for step in range(120):
    y = torch.randint(4, (48,))
    real = (0.5 + 0.4 * torch.rand(48, 1)) * waves[y] + 0.02 * torch.randn(48, 16)
    real.requires_grad_(step % 4 == 0)
    scores = discriminator(real, y)
    loss_d = F.softplus(-scores).mean() + F.softplus(discriminator(generator(torch.randn(48, 8), y).detach(), y)).mean()
    if step % 4 == 0:
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        loss_d = loss_d + 4 * 0.05 * slope.square().sum(-1).mean()
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    y = torch.randint(4, (48,))
    loss_g = F.softplus(-discriminator(generator(torch.randn(48, 8), y), y)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    if step % 3 == 0:
        print(f"step {step}: loss {loss_d.item():.4f}, generator {loss_g.item():.4f}")
