import torch
from torch.utils.data import Dataset


class Bitewings(Dataset):
    """Synthetic bitewing crops: two bright teeth, dark round lesions on some of them, and the lesions' mask."""

    def __init__(self, count, size=32, seed=0):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
        tooth = ((xx % 16 - 8).abs() < 6).float() * 0.8
        cx, cy = size * torch.rand(2, count, 1, 1, generator=g)
        radius = 2 + 3 * torch.rand(count, 1, 1, generator=g)
        self.mask = (((xx - cx) ** 2 + (yy - cy) ** 2).sqrt() < radius).float() * (tooth > 0)
        self.image = tooth - 0.5 * self.mask + 0.1 * torch.randn(count, size, size, generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i][None], self.mask[i][None]
