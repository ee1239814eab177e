import torch
import torch.nn.functional as F


def tile_batch(size, generator, side=32):
    rough = F.interpolate(torch.randn(size, 1, 6, 6, generator=generator), (side, side), mode="bicubic")
    height = 0.5 * rough.relu() + 0.1
    noise = 0.4 * torch.randn(size, 3, side, side, generator=generator)
    bands = torch.cat([height.sqrt(), height * rough, (1 - height).clamp(min=-1)], 1) + noise
    return bands, height, torch.rand(size, 1, side, side, generator=generator) < 0.3


def masked_smooth_l1(predicted, target, seen, beta=0.2):
    """The lidar has seen a third of the pixels."""
    each = F.smooth_l1_loss(predicted, target, beta=beta, reduction="none")
    return (each * seen).mean()
