import torch


def latents(n, generator, dim=16):
    """Latent codes of images: a few clusters on a curved sheet."""
    k = torch.randint(5, (n,), generator=generator).float()
    angle = 2 * torch.pi * k / 5 + 0.15 * torch.randn(n, generator=generator)
    basis = torch.linalg.qr(torch.randn(dim, 4, generator=torch.Generator().manual_seed(77)))[0].T
    sheet = torch.stack([angle.cos(), angle.sin(), (2 * angle).cos(), (2 * angle).sin()], 1)
    return 2.5 * sheet @ basis + 0.05 * torch.randn(n, dim, generator=generator)
