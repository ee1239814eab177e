"""A DCGAN on small pictures: BCE losses wander up and down, and neither side wins for long."""

import torch
import torch.nn as nn

nz, ngf, ndf, batch = 16, 16, 16, 32
torch.manual_seed(524)


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.05)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, 2 * ngf, 4, bias=False),
            nn.BatchNorm2d(2 * ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(2 * ngf, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, 2 * ndf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * ndf),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * ndf, 1, 4, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def rings(n):
    g = torch.linspace(-1, 1, 16)
    r = 0.3 + 0.5 * torch.rand(n, 1, 1)
    d = (g.view(-1, 1) ** 2 + g**2).sqrt()
    return (2 * torch.exp(-20 * (d - r) ** 2) - 1).unsqueeze(1) + 0.05 * torch.randn(n, 1, 16, 16)


netG, netD = Generator(), Discriminator()
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=4e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=4e-4, betas=(0.5, 0.999))
for i in range(160):
    netD.zero_grad()
    real = netD(rings(batch))
    err_real = criterion(real, torch.full((batch,), 0.9))
    err_real.backward()
    fake = netG(torch.randn(batch, nz, 1, 1))
    err_fake = criterion(netD(fake.detach()), torch.zeros(batch))
    err_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    err_g = criterion(netD(fake), torch.ones(batch))
    err_g.backward()
    optimizerG.step()
    if i % 4 == 0:
        print(
            "[%d] D loss: %.4f G: %.4f D(x): %.3f" % (i, (err_real + err_fake).item(), err_g.item(), real.mean().item())
        )
