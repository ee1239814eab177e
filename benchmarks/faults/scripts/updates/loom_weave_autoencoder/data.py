import torch
from torch.utils.data import DataLoader, TensorDataset


def weave(n, g, side=24):
    """Twill of varying pitch, angle and phase."""
    yy, xx = torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")
    pitch = 0.6 + 0.5 * torch.rand(n, 1, 1, generator=g)
    angle = 0.5 + 0.4 * torch.rand(n, 1, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    twill = torch.sin(pitch * (xx * angle.cos() + yy * angle.sin()) + phase)
    return (twill + 0.1 * torch.randn(n, side, side, generator=g))[:, None]


def loader(n=1280, batch=64, seed=1):
    g = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(weave(n, g)), batch, shuffle=True, generator=g)
