import torch


def cells(n, generator, features=32, kinds=10):
    """Feature vectors of cell images: a kind, an individual, and nuisance directions."""
    fixed = torch.Generator().manual_seed(99)
    kind = 1.0 * torch.randn(kinds, features, generator=fixed)
    y = torch.randint(kinds, (n,), generator=generator)
    return kind[y] + 0.7 * torch.randn(n, features, generator=generator), y


def view(x, generator):
    """Brightness, noise and dropped features."""
    gain = 1 + 0.3 * torch.randn(len(x), 1, generator=generator)
    keep = (torch.rand(x.shape, generator=generator) > 0.2).float()
    return gain * x * keep + 0.4 * torch.randn(x.shape, generator=generator)
