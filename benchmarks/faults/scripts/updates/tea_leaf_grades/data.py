"""Leaf photographs, reduced to 24 x 24 pixels, and the grade a taster gave them."""

import torch
from torch.utils.data import DataLoader, TensorDataset


def leaves(count, seed):
    g = torch.Generator().manual_seed(seed)
    grade = torch.randint(0, 5, (count,), generator=g)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing="ij")
    width = 0.25 + 0.08 * grade.float() + 0.03 * torch.randn(count, generator=g)
    angle = 3.14 * torch.rand(count, generator=g)
    u = xx * angle.cos()[:, None, None] + yy * angle.sin()[:, None, None]
    v = yy * angle.cos()[:, None, None] - xx * angle.sin()[:, None, None]
    body = ((u / 0.9) ** 2 + (v / width[:, None, None]) ** 2 < 1).float()
    tint = torch.stack([0.2 + 0.1 * grade, 0.7 - 0.06 * grade, 0.2 + 0.0 * grade], 1)
    image = body[:, None] * tint[:, :, None, None] + 0.15 * torch.randn(count, 3, 24, 24, generator=g)
    return TensorDataset((image - 0.2) / 0.3, grade)


def loaders(batch_size):
    g = torch.Generator().manual_seed(3)
    train = DataLoader(leaves(1024, 1), batch_size, shuffle=True, drop_last=True, generator=g)
    return train, DataLoader(leaves(256, 2), 128)
