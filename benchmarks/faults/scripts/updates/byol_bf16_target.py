"""BYOL on small synthetic images. Everything lives in bfloat16 to save memory, the target network too."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

MOMENTUM = 0.996
device_dtype = torch.bfloat16


def encoder(width=24, out=32):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 16, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, out),
    )


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = encoder()
        self.predictor = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.target = copy.deepcopy(self.online).to(device_dtype)
        for p in self.target.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update_target(self):
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.mul_(MOMENTUM).add_(online.to(target.dtype), alpha=1 - MOMENTUM)

    def forward(self, view1, view2):
        p1, p2 = self.predictor(self.online(view1)), self.predictor(self.online(view2))
        with torch.no_grad():
            z1 = self.target(view1.to(device_dtype)).float()
            z2 = self.target(view2.to(device_dtype)).float()
        return 2 - F.cosine_similarity(p1, z2).mean() - F.cosine_similarity(p2, z1).mean()


def images(n):
    grid = torch.linspace(-1, 1, 16)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    cx, cy, r = (torch.rand(3, n, 1, 1) - 0.5).unbind(0)
    return torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / (0.15 + 0.2 * r.abs())).unsqueeze(1)


def augment(x):
    shift = int(torch.randint(-2, 3, (1,)))
    return torch.roll(x, shift, dims=-1) * (0.8 + 0.4 * torch.rand(len(x), 1, 1, 1)) + 0.1 * torch.randn_like(x)


torch.manual_seed(2102)
byol = BYOL()
start = copy.deepcopy(byol.target)
trained = [*byol.online.parameters(), *byol.predictor.parameters()]
optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=1e-4)
for step in range(200):
    batch = images(32)
    loss = byol(augment(batch), augment(batch))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    byol.update_target()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
