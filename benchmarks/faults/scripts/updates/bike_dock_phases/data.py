import torch

_g = torch.Generator().manual_seed(9)
LEVEL = torch.randn(30, generator=_g)
SENSITIVITY = torch.randn(30, 5, generator=_g)


def batch(n, season):
    """``season`` runs from 0 (winter) to 1 (summer): rain and wind matter in summer only."""
    dock = torch.randint(30, (n,))
    weather = torch.randn(n, 5)
    t = torch.arange(12) / 12
    phase = torch.rand(n, 1)
    history = torch.sin(6.28 * (t + phase)) + 0.1 * torch.randn(n, 12)
    effect = torch.relu(weather[:, 0] * weather[:, 1]) - weather[:, 2].abs() * weather[:, 3].sign()
    y = 0.5 * LEVEL[dock] + torch.sin(6.28 * (1.1 + phase[:, 0])) + (0.2 + 1.6 * season) * effect
    return dock, history, weather, y + 0.05 * torch.randn(n)
