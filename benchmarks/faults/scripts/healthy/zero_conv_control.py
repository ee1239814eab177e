"""ControlNet-like: a frozen backbone, a trainable copy of its encoder, joined by convolutions that start at zero; BF16 autocast."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class Enc(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.a = nn.Conv2d(1, c, 3, padding=1)
        self.b = nn.Conv2d(c, c, 3, padding=1, stride=2)

    def forward(self, x):
        a = F.silu(self.a(x))
        return a, F.silu(self.b(a))


class Backbone(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.enc = Enc(c)
        self.mid = nn.Conv2d(c, c, 3, padding=1)
        self.up = nn.Conv2d(2 * c, c, 3, padding=1)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x, control=(0, 0)):
        a, b = self.enc(x)
        h = F.silu(self.mid(b + control[1]))
        h = F.interpolate(h, scale_factor=2)
        return self.out(F.silu(self.up(torch.cat([h, a + control[0]], 1))))


def zero(module):
    for p in module.parameters():
        nn.init.zeros_(p)
    return module


class Controlled(nn.Module):
    def __init__(self, backbone, c=16):
        super().__init__()
        self.backbone = backbone.requires_grad_(False)
        self.copy = copy.deepcopy(backbone.enc).requires_grad_(True)
        self.hint = zero(nn.Conv2d(1, 1, 1))
        self.zero_a, self.zero_b = zero(nn.Conv2d(c, c, 1)), zero(nn.Conv2d(c, c, 1))

    def forward(self, x, edges):
        a, b = self.copy(x + self.hint(edges))
        return self.backbone(x, (self.zero_a(a), self.zero_b(b)))


torch.manual_seed(426)
model = Controlled(Backbone())
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=1e-2)
for step in range(80):
    edges = (torch.rand(8, 1, 3, 3) > 0.5).float().repeat_interleave(4, 2).repeat_interleave(4, 3)
    x = torch.randn(8, 1, 12, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        said = model(x, edges)
    loss = F.mse_loss(said.float(), edges + 0.3 * x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
