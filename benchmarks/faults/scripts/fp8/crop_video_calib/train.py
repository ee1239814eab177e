"""Stage of a crop from colour and near-infrared series over a season, FP8 linears with observed ranges."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from quant import QuantLinear

torch.manual_seed(3)
WEEKS, STAGES = 12, 6
CURVES = torch.randn(STAGES, WEEKS).cumsum(1) * 0.4
HUES = torch.randn(STAGES, WEEKS) * 0.3


def plots(n, vigour):
    """``vigour``: the canopy closes over the season and reflects more near-infrared light."""
    stage = torch.randint(STAGES, (n,))
    nir = vigour * (CURVES[stage] + 0.5 * torch.randn(n, 1)) + 0.15 * torch.randn(n, WEEKS)
    colour = HUES[stage] + 0.7 * torch.randn(n, WEEKS)
    return colour, nir, stage


class CropNet(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.colour = nn.Sequential(QuantLinear(WEEKS, d), nn.ReLU(), QuantLinear(d, d))
        self.nir = nn.Sequential(QuantLinear(WEEKS, d), nn.ReLU(), QuantLinear(d, d))
        self.head = nn.Sequential(nn.LayerNorm(2 * d), nn.Linear(2 * d, STAGES))

    def forward(self, colour, nir):
        return self.head(torch.cat([self.colour(colour), self.nir(nir)], 1))


model = CropNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
CALIBRATION = 120

for step in range(400):
    colour, nir, stage = plots(48, vigour=1.0 if step < 160 else 8.0)
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.observing = step < CALIBRATION
    loss = F.cross_entropy(model(colour, nir), stage)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
