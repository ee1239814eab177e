import torch


def profiles(n, g, length=40):
    """Thickness of sea ice along a line: level ice, a ridge here and there."""
    x = torch.arange(length).float()
    level = 1.0 + 0.3 * torch.randn(n, 1, generator=g)
    ridge = 1.5 * torch.rand(n, 1, generator=g)
    place = length * torch.rand(n, 1, generator=g)
    return level + ridge * torch.exp(-((x - place) ** 2) / 18) - 1.3


def noised(x, t, noise):
    alpha = torch.cos(0.5 * torch.pi * t)[:, None]
    sigma = torch.sin(0.5 * torch.pi * t)[:, None]
    return alpha * x + sigma * noise, alpha * noise - sigma * x


def v_loss(net, x, t, noise):
    z, v = noised(x, t, noise)
    return (net(z, t) - v).square().mean()
