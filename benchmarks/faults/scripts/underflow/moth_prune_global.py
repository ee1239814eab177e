"""Moth species from shape and wing texture; most weights are pruned by size before the long tail comes in."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(26)
SPECIES = 8
outline = torch.randn(4, 1, 10, 10)
pattern = torch.sign(torch.randn(SPECIES, 1, 4, 4))


def moths(n, share):
    """Four outlines, two species each: the texture separates them, and is needed for ``share`` of the images."""
    kind = torch.randint(4, (n,))
    twin = (torch.rand(n) < share).long() * torch.randint(2, (n,))
    species = kind + 4 * twin
    texture = pattern[species].repeat(1, 1, 3, 3)[..., :10, :10]
    return outline[kind] + 0.4 * torch.randn(n, 1, 10, 10), texture + 0.5 * torch.randn(n, 1, 10, 10), species


class MothNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.shape = nn.Sequential(nn.Flatten(), nn.Linear(100, 48), nn.ReLU(), nn.Linear(48, 24))
        self.texture = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.head = nn.Linear(48, SPECIES)
        for m in self.texture:
            if isinstance(m, nn.Conv2d):  # as in the release that the branch comes from
                nn.init.normal_(m.weight, std=0.01)
                nn.init.zeros_(m.bias)

    def forward(self, shape, texture):
        return self.head(F.relu(torch.cat([self.shape(shape), 8 * self.texture(texture)], 1)))


def magnitude_masks(model, keep):
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1 and not n.startswith("head")}
    everything = torch.cat([p.detach().abs().flatten() for p in weights.values()])
    threshold = everything.quantile(1 - keep)
    return {n: (p.detach().abs() >= threshold).float() for n, p in weights.items()}


model = MothNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
masks = {}
for step in range(420):
    if step == 100:
        masks = magnitude_masks(model, keep=0.15)
    shape, texture, species = moths(32, share=0.1 if step < 100 else 1.0)
    loss = F.cross_entropy(model(shape, texture), species)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n in masks:
                p.mul_(masks[n])
    if step % 6 == 5:
        print(f"step {step} loss {loss.item():.4f}")
