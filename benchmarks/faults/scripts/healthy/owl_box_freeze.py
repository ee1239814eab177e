"""Boxes around owls: the backbone is trained for the first third, then frozen, as the heads need longer than it does."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(44)
S = 16
owl = torch.randn(1, 4, 4).abs() + 0.5


def photos(n):
    corner = torch.randint(0, S - 4, (n, 2))
    x = 0.4 * torch.randn(n, 1, S, S)
    for i, (r, c) in enumerate(corner.tolist()):
        x[i, :, r : r + 4, c : c + 4] += owl
    return x, (corner.float() + 2) / S


class Detector(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, c, 4, stride=2, padding=1), nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1)
        )
        self.box = nn.Sequential(nn.Linear(c * 64, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x):
        return self.box(F.relu(self.backbone(x)).flatten(1))


model = Detector()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
for step in range(400):
    if step == 130:
        # statistics too
        model.backbone.requires_grad_(False).eval()
    x, centre = photos(32)
    loss = F.smooth_l1_loss(model(x), centre, beta=0.05)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.5f}")
