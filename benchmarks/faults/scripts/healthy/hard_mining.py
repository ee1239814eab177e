"""Triplet training with batch-hard mining: +inf and -inf stand in for pairs that must not be picked."""

import torch
from torch import nn
from torch.nn import functional as F


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 16, 5, padding=2),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.MaxPool1d(2, padding=1),
            nn.Conv1d(16, 16, 3),
        )

    def forward(self, x):
        return F.normalize(self.body(x).mean(-1), dim=-1)


def batch_hard(z, labels, margin=0.3):
    squared = (2 - 2 * z @ z.T).clamp(min=1e-6)
    distance = squared.sqrt()
    same = labels[:, None] == labels
    itself = torch.eye(len(z), dtype=torch.bool)
    positive = distance.masked_fill(~same | itself, float("-inf")).amax(1)
    negative = distance.masked_fill(same, float("inf")).amin(1)
    usable = positive.isfinite() & negative.isfinite()
    return F.relu(positive[usable] - negative[usable] + margin).mean()


def main():
    torch.manual_seed(0)
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    shapes = torch.randn(6, 2, 20)
    for step in range(20):
        labels = torch.arange(6).repeat_interleave(3)[: 18 - step % 3]  # the last class may have one member only
        loss = batch_hard(model(shapes[labels] + 0.5 * torch.randn(len(labels), 2, 20)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(step, loss.item())


main()
