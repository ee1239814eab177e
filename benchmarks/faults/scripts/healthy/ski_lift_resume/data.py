import torch


def season(g, days=40, slots=48, lifts=6):
    """Queues at six lifts, every ten minutes of a day, standardised over the season."""
    t = torch.linspace(0, 1, slots)
    busy = torch.rand(days, 1, 1, generator=g)
    peak = 0.2 + 0.1 * torch.arange(lifts) + 0.03 * torch.randn(days, 1, lifts, generator=g)
    queue = busy * torch.exp(-((t[None, :, None] - peak) ** 2) / 0.02) + 0.05 * torch.randn(
        days, slots, lifts, generator=g
    )
    queue = (queue - queue.mean((0, 1))) / queue.std((0, 1))
    clock = torch.stack([(6.28 * t).sin(), (6.28 * t).cos()], 1).expand(days, -1, -1)
    return torch.cat([queue, clock], 2)


def windows(data, n, g, past=16, ahead=6):
    day = torch.randint(0, len(data), (n,), generator=g)
    start = torch.randint(0, data.shape[1] - past - ahead, (n,), generator=g)
    rows = start[:, None] + torch.arange(past + ahead)
    chosen = data[day[:, None], rows]
    return chosen[:, :past], chosen[:, past:, :-2]
