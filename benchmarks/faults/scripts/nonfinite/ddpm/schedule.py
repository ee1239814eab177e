"""Noise schedules."""

import math

import torch


def cosine_betas(steps, s=0.008):
    t = torch.linspace(0, steps, steps + 1, dtype=torch.float64) / steps
    alpha_bar = torch.cos((t + s) / (1 + s) * math.pi * 0.5) ** 2
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999).float()


def linear_betas(steps, low=-2e-4, high=0.02):
    return torch.linspace(low, high, steps)
