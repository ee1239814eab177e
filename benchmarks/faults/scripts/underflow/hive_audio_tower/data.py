import torch


def hives(n, g):
    """Calm, foraging, queenless, about to swarm: the hum's pitch and beat tell most, the climate tells some."""
    state = torch.randint(0, 4, (n,), generator=g)
    bands, frames = torch.arange(24.0)[:, None], torch.arange(24.0)[None]
    pitch = (5 + 4 * state[:, None, None] + torch.randn(n, 1, 1, generator=g)).float()
    beat = 1 + 0.5 * torch.sin(frames * (0.3 + 0.2 * state[:, None, None]))
    mel = torch.exp(-((bands - pitch) ** 2) / 8) * beat * 2 + 0.5 * torch.randn(n, 24, 24, generator=g)
    climate = torch.randn(n, 8, generator=g)
    climate[:, 0] += 0.8 * (state == 3) - 0.5 * (state == 0)
    return mel[:, None], climate, state
