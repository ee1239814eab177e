"""Heights of dunes from aerial tiles; mixed precision by hand with a constant loss scale, bad steps are skipped."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(67)
LOSS_SCALE = 65536.0


class DuneNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        )
        self.regressor = nn.Sequential(nn.Flatten(), nn.Linear(width * 64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.regressor(self.encoder(x)).squeeze(-1)


def tiles(n):
    height = torch.rand(n) * 4
    grid = torch.linspace(0, 6.28, 16)
    ripples = torch.sin(height[:, None, None] * grid[:, None] + grid) + 0.1 * torch.randn(n, 16, 16)
    return ripples.unsqueeze(1), height


model = DuneNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
done = skipped = 0
for it in range(200):
    x, height = tiles(16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
        loss = F.mse_loss(out.float(), height, reduction="sum") / 4
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    grads = [p.grad for p in model.parameters()]
    if not all(torch.isfinite(g).all() for g in grads):
        skipped += 1
    else:
        for g in grads:
            g.mul_(1.0 / LOSS_SCALE)
        optimizer.step()
        done += 1
    if it % 10 == 9:
        print(f"it {it + 1} loss {loss.item():.4f} skipped {skipped}")
