import torch


def stamps(n, g, flux=(0.1, 12.0), side=12):
    """Guide stars of some flux, off the centre by a pixel or two; the target is the offset and the logarithm of the flux."""
    low, high = torch.tensor(flux).log()
    log_flux = low + (high - low) * torch.rand(n, generator=g)
    offset = 1.5 * torch.randn(n, 2, generator=g).clamp(-2, 2)
    yy, xx = torch.meshgrid(torch.arange(side) - 5.5, torch.arange(side) - 5.5, indexing="ij")
    far = (xx - offset[:, 0, None, None]) ** 2 + (yy - offset[:, 1, None, None]) ** 2
    image = log_flux.exp()[:, None, None] * torch.exp(-far / 6) + 0.05 * torch.randn(n, side, side, generator=g)
    return image.flatten(1), torch.cat([offset / 1.5, log_flux[:, None] / 2], 1)
