"""Remaining-life regression from turbine sensors; gaps are NaN in the archive, some blocks are not usable at all."""

import torch
from torch import nn

SENSORS, TIME = 8, 30


class LifeNet(nn.Module):
    """Temporal convolution over readings and the flags that say which of them exist."""

    def __init__(self, width=32):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(2 * SENSORS if d == 1 else width, width, 3, dilation=d, padding=d) for d in (1, 2, 4)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in self.convs)
        self.head = nn.Linear(width, 1)

    def forward(self, readings, present):
        h = torch.cat([readings, present.float()], 1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = torch.nn.functional.silu(norm(conv(h)))
        return self.head(h.mean(-1)).squeeze(-1)


def archive(blocks, generator, size=24):
    """Wear raises all readings; single values are missing, and a block may come from a logger that saturated."""
    gain = 0.5 + torch.rand(SENSORS, 1, generator=generator)
    for block in range(blocks):
        life = torch.rand(size, generator=generator)
        trend = (1 - life)[:, None, None] * gain + 0.1 * torch.linspace(0, 1, TIME)
        readings = trend + 0.3 * torch.randn(size, SENSORS, TIME, generator=generator)
        missing = torch.rand(readings.shape, generator=generator) < 0.08
        readings = readings.masked_fill(missing, torch.nan)
        if block % 17 == 9:
            readings[:, 2] = torch.inf
        yield readings, life


def usable(readings):
    return not readings.isinf().any()


def fill(readings):
    present = ~readings.isnan()
    return torch.where(present, readings, 0.0), present


torch.manual_seed(151)
model = LifeNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
steps = dropped = 0
for readings, life in archive(110, torch.Generator().manual_seed(152)):
    if not usable(readings):
        dropped += 1
        continue
    loss = nn.functional.smooth_l1_loss(model(*fill(readings)), life, beta=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if steps % 20 == 0:
        print(f"step {steps} loss {loss.item():.4f} dropped {dropped}")
    steps += 1
