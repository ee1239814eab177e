"""WGAN with gradient penalty on 8x8 digits-like images."""

import torch
from torch import nn, autograd, optim

torch.manual_seed(11)
LATENT = 16
LAMBDA = 10


class Generator(nn.Module):
    def __init__(self):
        super(Generator, self).__init__()
        self.main = nn.Sequential(nn.Linear(LATENT, 64), nn.ReLU(True), nn.Linear(64, 64), nn.Tanh())

    def forward(self, z):
        return self.main(z)


class Critic(nn.Module):
    def __init__(self):
        super(Critic, self).__init__()
        self.main = nn.Sequential(
            nn.Linear(64, 24),
            nn.ReLU(True),
            nn.Linear(24, 2),
            nn.ReLU(True),
            nn.Linear(2, 1),
        )

    def forward(self, x):
        return self.main(x)


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    grads = autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)[0]
    slopes = grads.pow(2).sum(dim=1).sqrt()
    return LAMBDA * ((slopes - 1) ** 2).mean()


netG, netD = Generator(), Critic()
optG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
optD = optim.Adam(netD.parameters(), lr=5e-2, betas=(0.5, 0.9))
templates = torch.rand(10, 64).mul(2).sub(1)

for iteration in range(12):
    for _ in range(3):  # critic iterations
        real = templates[torch.randint(10, (32,))] + 0.05 * torch.randn(32, 64)
        fake = netG(torch.randn(32, LATENT)).detach()
        optD.zero_grad()
        loss_d = netD(fake).mean() - netD(real).mean() + gradient_penalty(netD, real, fake)
        loss_d.backward()
        optD.step()
    optG.zero_grad()
    loss_g = -netD(netG(torch.randn(32, LATENT))).mean()
    loss_g.backward()
    optG.step()
    print("iteration", iteration, "D", loss_d.item(), "G", loss_g.item())
