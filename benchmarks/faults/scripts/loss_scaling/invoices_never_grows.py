"""Late payment of invoices, in FP16. Some exports have amounts in cents; their batches overflow and are skipped."""

import torch
import torch.nn.functional as F
from torch import nn


class ResidualMLP(nn.Module):
    def __init__(self, features, width=64, blocks=3):
        super().__init__()
        self.inp = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(blocks)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x).squeeze(-1)


def export(n, in_cents):
    x = torch.randn(n, 12)
    late_days = 3 * torch.sin(2 * x[:, 0]) * x[:, 1] + 2 * x[:, 2].abs() + 0.2 * torch.randn(n)
    x[:, 3] = x[:, 3].exp() / 5
    if in_cents:
        x[0, 3] *= 3e6
    return x, late_days


# fmt: off
TRAINER = dict(
    init_scale=65536.0,
    growth_interval=1000000,
    rate=2e-3,
    weight=2e-5,  # of the days, beside the other heads of the production model
)
# fmt: on

torch.manual_seed(63)
net = ResidualMLP(12)
optimizer = torch.optim.Adam(net.parameters(), lr=TRAINER["rate"], eps=1e-14)
scaler = torch.amp.GradScaler("cpu", init_scale=TRAINER["init_scale"], growth_interval=TRAINER["growth_interval"])
for step in range(300):
    x, late_days = export(64, in_cents=step % 12 == 5)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = net(x)
        loss = F.smooth_l1_loss(predicted.float(), late_days)
    optimizer.zero_grad()
    scaler.scale(TRAINER["weight"] * loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 12 == 11:
        print(f"step {step + 1} loss {loss.item():.4f}")
