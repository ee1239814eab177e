import torch


def blocks(n, g, patterns, side=16):
    kind = torch.randint(0, len(patterns), (n,), generator=g)
    cloth = torch.randn(n, 2, 3, generator=g)
    mask = patterns[kind][:, None]
    image = mask * cloth[:, 0, :, None, None] + (1 - mask) * cloth[:, 1, :, None, None]
    return image + 0.4 * torch.randn(n, 3, side, side, generator=g), kind


def make_patterns(g, count=8, side=16):
    small = (torch.rand(count, 1, 4, 4, generator=g) < 0.5).float()
    return torch.nn.functional.interpolate(small, (side, side)).squeeze(1)
