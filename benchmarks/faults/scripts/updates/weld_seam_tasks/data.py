import torch


class Welds:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.shapes = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(99)).cumsum(2) / 8

    def __call__(self, n=64):
        joint = torch.randint(0, 8, (n,), generator=self.g)
        width, depth = torch.randn(2, n, generator=self.g)
        t = torch.linspace(0, 1, 64)
        current = torch.sin(20 * t + width[:, None]) + 0.3 * depth[:, None]
        voltage = torch.cos(20 * t - width[:, None]) * (1 + 0.3 * depth[:, None])
        x = torch.stack([current, voltage], 1) + 0.6 * self.shapes[joint]
        return x + 0.2 * torch.randn(n, 2, 64, generator=self.g), 2 * width + 1, depth - 1, joint
