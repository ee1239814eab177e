"""Revenue in single dollars (1e8 and more), standardised in the model; weights span many magnitudes. FP32."""

import torch
from torch import nn


class Standardize(nn.Module):
    def __init__(self, reference):
        super().__init__()
        self.register_buffer("mean", reference.mean(0))
        self.register_buffer("std", reference.std(0))

    def forward(self, x):
        return (x - self.mean) / self.std

    def inverse(self, z):
        return z * self.std + self.mean


class RevenueNet(nn.Module):
    def __init__(self, x, y):
        super().__init__()
        self.enter, self.leave = Standardize(x), Standardize(y)
        self.body = nn.Sequential(nn.Linear(x.size(1), 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.leave.inverse(self.body(self.enter(x)).squeeze(-1))


def companies(n):
    size = torch.exp(3 * torch.randn(n))
    x = torch.stack([1e6 * size, 1e3 * size.sqrt(), torch.randn(n)], 1)
    return x, 1e8 * size.log1p() * (1 + 0.1 * torch.randn(n))


torch.manual_seed(0)
x, y = companies(256)
net = RevenueNet(x, y)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for epoch in range(5):
    for index in torch.randperm(256).split(64):
        loss = nn.functional.mse_loss(net(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.3e} dollars squared")
