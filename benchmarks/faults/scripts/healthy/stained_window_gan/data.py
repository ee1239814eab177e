import torch


def panes(n, g):
    """Windows of 8 x 8 panes: a lead cross, two colours of glass, seen by their brightness."""
    image = torch.zeros(n, 8, 8)
    left, right = torch.rand(2, n, 1, 1, generator=g)
    image[:, :, :4] += 1.2 * left - 0.3
    image[:, :, 4:] += 0.6 * right - 0.6
    index = torch.arange(n)
    image[index, torch.randint(2, 6, (n,), generator=g)] = -0.95
    return (image + 0.03 * torch.randn(n, 8, 8, generator=g)).clamp(-1, 1).flatten(1)
