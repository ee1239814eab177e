import torch


def vines(n, g, side=48, cell=4):
    """Leaves as a noisy background, two bunches of grapes as dark ellipses."""
    grid = side // cell
    image = 0.5 + 0.2 * torch.randn(n, 3, side, side, generator=g)
    positive = torch.zeros(n, grid, grid)
    distances = torch.zeros(n, 4, grid, grid)
    yy, xx = torch.meshgrid(torch.arange(side).float(), torch.arange(side).float(), indexing="ij")
    index = torch.arange(n)
    for _ in range(2):
        cx, cy = 6 + (side - 12) * torch.rand(2, n, generator=g)
        rx, ry = 3 + 3 * torch.rand(2, n, generator=g)
        inside = ((xx - cx[:, None, None]) / rx[:, None, None]) ** 2 + (
            (yy - cy[:, None, None]) / ry[:, None, None]
        ) ** 2 < 1
        image[:, 2] += 0.6 * inside
        image[:, 1] -= 0.5 * inside
        i, j = (cy / cell).long(), (cx / cell).long()
        positive[index, i, j] = 1.0
        distances[index, :, i, j] = torch.stack([rx, ry, cx - cell * j, cy - cell * i], 1) / 4
    return image, positive, distances
