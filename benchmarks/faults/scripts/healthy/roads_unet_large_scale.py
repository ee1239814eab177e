"""Road masks from tiles; FP16 with the scaler's default start, which overflows a few times, then settles."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
S = 16


def tiles(n):
    grid = torch.arange(S)
    a, b = 0.6 * torch.randn(n, 1, 1), S * torch.rand(n, 1, 1)
    mask = ((grid.view(1, S, 1) - a * grid.view(1, 1, S) - b).abs() < 1.5).float()
    return (2 * mask + 0.5 * torch.randn(n, S, S)).unsqueeze(1), mask


class Net(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.up, self.out = nn.ConvTranspose2d(2 * c, c, 2, 2), nn.Conv2d(2 * c, 1, 1)

    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.up(F.relu(self.b(a))))
        return self.out(torch.cat([a, b], 1)).squeeze(1)


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for step in range(70):
    x, mask = tiles(16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g}")
