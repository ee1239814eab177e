from torch import nn


class WaferNet(nn.Module):
    """Kind of a pattern on a wafer map, from its polar histogram."""

    def __init__(self, width=64, kinds=6):
        super().__init__()
        self.inp = nn.Linear(160, width)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(3)
        )
        self.out = nn.Linear(width, kinds)

    def forward(self, x):
        x = self.inp(x)
        for block in self.body:
            x = x + block(x)
        return self.out(x)
