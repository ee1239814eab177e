import torch


def polyps(n, size, generator):
    """Noisy frames with one bright ellipse each, and its mask."""
    grid = torch.arange(size, dtype=torch.float32)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    centre = size * (0.25 + 0.5 * torch.rand(n, 2, 1, 1, generator=generator))
    radius = size * (0.1 + 0.15 * torch.rand(n, 2, 1, 1, generator=generator))
    mask = (((yy - centre[:, 0]) / radius[:, 0]) ** 2 + ((xx - centre[:, 1]) / radius[:, 1]) ** 2 < 1).float()
    frames = 1.2 * mask + 0.6 * torch.randn(n, size, size, generator=generator)
    return frames[:, None], mask[:, None]
