"""Origin of olive oils from near-infrared spectra with a highway network (gates closed at first, to help depth)."""

import torch
import torch.nn.functional as F
from torch import nn

CARRY_BIAS = -14.0
BANDS, ORIGINS = 40, 6


class Highway(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, CARRY_BIAS)

    def forward(self, x):
        t = torch.sigmoid(self.gate(x))
        return t * torch.relu(self.transform(x)) + (1 - t) * x


class OriginNet(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.highways = nn.ModuleList(Highway(BANDS) for _ in range(depth))
        self.classify = nn.Linear(BANDS, ORIGINS)

    def forward(self, spectrum):
        for layer in self.highways:
            spectrum = layer(spectrum)
        return self.classify(spectrum)


def batch_of_oils(n, peaks):
    origin = torch.randint(ORIGINS, (n,))
    turned = (torch.randint(2, (n,)) == 1) & (origin % 2 == 0)  # some cuvettes go in either way round
    sign = torch.where(turned, -1.0, 1.0)[:, None]
    spectrum = sign * peaks[origin] + 0.5 * torch.randn(n, BANDS)
    return spectrum, origin


torch.manual_seed(30)
peaks = torch.randn(ORIGINS, BANDS)
model = OriginNet()
optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for i in range(240):
    spectrum, origin = batch_of_oils(64, peaks)
    loss = F.cross_entropy(model(spectrum), origin)
    optim.zero_grad()
    loss.backward()
    optim.step()
    if (i + 1) % 12 == 0:
        print(f"{i + 1:4d} loss={loss.item():.4f}")
