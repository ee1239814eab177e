"""Keypoint matching with an attentional graph network and Sinkhorn normalisation (as in SuperGlue, without logs)."""

import torch
from torch import nn


class Sinkhorn(nn.Module):
    def __init__(self, temperature=0.01, iterations=5):
        super().__init__()
        self.temperature, self.iterations = temperature, iterations

    def forward(self, scores):
        kernel = torch.exp((scores - scores.amax((-1, -2), keepdim=True)) / self.temperature)
        for _ in range(self.iterations):
            kernel = kernel / kernel.sum(-1, keepdim=True)
            kernel = kernel / kernel.sum(-2, keepdim=True)
        return kernel


class Matcher(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.describe = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, dim))
        self.attend = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.assign = Sinkhorn()

    def forward(self, left, right):
        a, b = self.describe(left), self.describe(right)
        a, b = a + self.attend(a, b, b, need_weights=False)[0], b + self.attend(b, a, a, need_weights=False)[0]
        return self.assign(a @ b.mT / a.size(-1) ** 0.5)


def pairs(n, points=10):
    left = torch.randn(n, points, 6)
    order = torch.stack([torch.randperm(points) for _ in range(n)])
    return left, torch.gather(left, 1, order.unsqueeze(-1).expand_as(left)) + 0.05 * torch.randn_like(left), order


if __name__ == "__main__":
    torch.manual_seed(0)
    matcher = Matcher()
    optimizer = torch.optim.Adam(matcher.parameters(), lr=5e-3)
    for step in range(40):
        left, right, order = pairs(8)
        matching = matcher(left, right)
        picked = matching.gather(1, order.unsqueeze(1)).squeeze(1)
        loss = (1 - picked).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, loss.item())
