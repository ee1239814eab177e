from torch import nn


class Encoder(nn.Module):
    def __init__(self, width=16, code=24):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, 2, 1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.to_code = nn.Linear(2 * width * 36, code)

    def forward(self, x):
        x = nn.functional.gelu(self.conv1(x))
        return self.to_code(nn.functional.gelu(self.conv2(x)).flatten(1))


class Decoder(nn.Module):
    def __init__(self, width=16, code=24):
        super().__init__()
        self.from_code = nn.Linear(code, 2 * width * 36)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(width, 1, 4, 2, 1)

    def forward(self, z):
        x = nn.functional.gelu(self.from_code(z)).unflatten(1, (-1, 6, 6))
        return self.up2(nn.functional.gelu(self.up1(x)))


class WeaveAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def strangeness(self, x):
        return (self(x) - x).square().mean((1, 2, 3))
