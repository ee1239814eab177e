import torch


def batch(size, generator):
    """Damped swings whose period depends on the load class, seen by six noisy accelerometers."""
    load = torch.randint(0, 6, (size,), generator=generator)
    t = torch.linspace(0, 8, 96)
    period = 1.1 + 0.16 * load[:, None] + 0.03 * torch.randn(size, 1, generator=generator)
    phase = 6.28 * torch.rand(size, 6, 1, generator=generator)
    swing = torch.sin(6.28 * t / period[:, None] + phase) * torch.exp(-0.1 * t)
    return swing + 0.5 * torch.randn(size, 6, 96, generator=generator), load
