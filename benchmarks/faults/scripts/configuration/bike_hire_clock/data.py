import math

import torch


def hires(generator, days=365):
    """Hourly hires of a year: rush hours on working days, a noon bump at weekends, weather."""
    hour = torch.arange(24 * days)
    of_day, day = hour % 24, hour // 24
    working = (day % 7 < 5).float()
    rush = torch.exp(-(((of_day - 8) / 1.5) ** 2)) + torch.exp(-(((of_day - 17) / 2.0) ** 2))
    noon = torch.exp(-(((of_day - 13) / 3.0) ** 2))
    weather = torch.randn(24 * days, 3, generator=generator)
    demand = working * 2 * rush + (1 - working) * 1.5 * noon + 0.3 * torch.sin(2 * math.pi * day / 365)
    demand = demand + 0.3 * weather[:, 0] + 0.1 * torch.randn(24 * days, generator=generator)
    return hour, weather, demand - demand.mean()
