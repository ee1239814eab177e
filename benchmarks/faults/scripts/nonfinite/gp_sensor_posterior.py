"""Gaussian process over learned features; hyperparameters by the predictive likelihood of held-out readings."""

import torch
from torch import nn
from torch.distributions import Normal


class FeatureKernel(nn.Module):
    """An RBF kernel on the output of a small network, with learned scale and amplitude."""

    def __init__(self, inputs=2, features=3):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(inputs, 24), nn.Tanh(), nn.Linear(24, features))
        self.log_scale = nn.Parameter(torch.tensor(0.0))
        self.log_amplitude = nn.Parameter(torch.tensor(0.0))

    def forward(self, a, b):
        d2 = torch.cdist(self.features(a), self.features(b)).square()
        return self.log_amplitude.exp() * torch.exp(-0.5 * d2 / self.log_scale.exp())


def posterior(kernel, x, y, new, jitter=1e-6):
    """Mean and variance of the process at ``new`` given readings (x, y), which have no noise."""
    train = kernel(x, x) + jitter * torch.eye(len(x))
    cross = kernel(x, new)
    chol = torch.linalg.cholesky(train)
    weights = torch.cholesky_solve(y[:, None], chol)
    explained = torch.cholesky_solve(cross, chol)
    mean = (cross.T @ weights).squeeze(1)
    variance = kernel.log_amplitude.exp() - (cross * explained).sum(0)
    return mean, variance


def field(x):
    return torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1])


def main():
    torch.manual_seed(5)
    kernel = FeatureKernel()
    optimizer = torch.optim.Adam(
        [
            {"params": kernel.features.parameters(), "lr": 5e-3},
            {"params": [kernel.log_scale, kernel.log_amplitude], "lr": 0.1},
        ]
    )
    for epoch in range(30):
        x = torch.randint(24, (48, 2)) / 12 - 1  # the sensors stand on a grid
        y = field(x)
        context, held_out = slice(0, 32), slice(32, 48)
        mean, variance = posterior(kernel, x[context], y[context], x[held_out])
        std = torch.sqrt(variance)
        loss = -Normal(mean, std + 1e-3, validate_args=False).log_prob(y[held_out]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 3 == 0:
            print(f"epoch {epoch} nlpd {loss.item():.4f} scale {kernel.log_scale.exp().item():.2f}")


main()
