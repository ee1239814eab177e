"""Averages the weights of the last steps for the published model; the running mean is kept in BF16."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class SumModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, 40), nn.Linear(40, 40), nn.Linear(40, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).squeeze(-1)


class RunningMean:
    def __init__(self, model):
        self.model = copy.deepcopy(model).bfloat16()
        self.count = 1

    @torch.no_grad()
    def add(self, model):
        self.count += 1
        still, total = 0, 0
        for mean, p in zip(self.model.parameters(), model.parameters()):
            before = mean.clone()
            mean.add_((p.to(mean.dtype) - mean) / self.count)
            still += int((mean == before).sum())
            total += mean.numel()
        self.still = still / total

    @torch.no_grad()
    def loss(self, x, y):
        evaluated = copy.deepcopy(self.model).to(x.dtype)
        return F.mse_loss(evaluated(x), y).item()


def target(x, w):
    return torch.sin(2 * x @ w)


if __name__ == "__main__":
    torch.manual_seed(3132)
    w = torch.randn(10) / 3
    model = SumModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    mean = RunningMean(model)
    x_test = torch.randn(512, 10)
    for step in range(500):
        x = torch.randn(32, 10)
        train = F.mse_loss(model(x), target(x, w) + 0.3 * torch.randn(32))
        optimizer.zero_grad()
        train.backward()
        optimizer.step()
        mean.add(model)
        if step % 25 == 24:
            print(f"step {step + 1} train {train.item():.4f} averaged loss {mean.loss(x_test, target(x_test, w)):.5f}")
