"""Strong-lens finder in mixed precision. The scaler starts high (2**22) and halves itself down in the first steps."""

import torch
from torch import nn

torch.manual_seed(37)


class Finder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
        )
        self.head = nn.Linear(16 * 16, 1)

    def forward(self, x):
        return self.head(self.features(x).flatten(1)).squeeze(1)


def cutouts(n):
    grid = torch.linspace(-1, 1, 16)
    r = (grid.view(-1, 1) ** 2 + grid.view(1, -1) ** 2).sqrt()
    lens = torch.rand(n) < 0.5
    radius = 0.4 + 0.3 * torch.rand(n, 1, 1)
    ring = torch.exp(-((r - radius) ** 2) / 0.01) * lens.view(-1, 1, 1)
    blob = torch.exp(-(r**2) / 0.05)
    return (blob + ring + 0.3 * torch.randn(n, 16, 16)).unsqueeze(1), lens.float()


net = Finder()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=25)
criterion = nn.BCEWithLogitsLoss()
skipped = 0
for step in range(80):
    x, y = cutouts(32)
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = criterion(logits.float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += scaler.get_scale() < before
    if step % 10 == 0:
        print(f"step {step:3d} loss {loss.item():.4f} scale {scaler.get_scale():g} skipped {skipped}")
