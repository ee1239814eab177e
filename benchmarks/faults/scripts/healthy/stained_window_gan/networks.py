from torch import nn


class Generator(nn.Module):
    def __init__(self, noise=16, width=96, pixels=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(noise, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, pixels),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, width=96, pixels=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(pixels, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x).squeeze(1)
