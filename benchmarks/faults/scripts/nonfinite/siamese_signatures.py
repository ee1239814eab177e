"""Siamese signature verification with a contrastive loss, gradient accumulation of 4."""

import random

import torch
import torch.nn as nn


class Twin(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.LazyLinear(24),
        )

    def forward(self, left, right):
        return self.cnn(left), self.cnn(right)


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=1.0):
        super().__init__()
        self.margin = margin

    def forward(self, a, b, same):
        distance = torch.sqrt(((a - b) ** 2).sum(dim=1))
        near = same * distance**2
        far = (1 - same) * torch.relu(self.margin - distance) ** 2
        return (near + far).mean()


def sample_pair(rng, signatures):
    if rng.random() < 0.5:
        person = rng.randrange(len(signatures))
        i, j = rng.randrange(8), rng.randrange(8)  # may pick the very same scan twice
        return signatures[person][i], signatures[person][j], 1.0
    p, q = rng.sample(range(len(signatures)), 2)
    return signatures[p][rng.randrange(8)], signatures[q][rng.randrange(8)], 0.0


def main():
    rng = random.Random(8)
    torch.manual_seed(8)
    shapes = torch.randn(6, 1, 20, 20)
    signatures = [[shape + 0.2 * torch.randn(1, 20, 20) for _ in range(8)] for shape in shapes]
    net, criterion = Twin(), ContrastiveLoss()
    net(shapes, shapes)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    for micro in range(24):
        left, right, same = zip(*(sample_pair(rng, signatures) for _ in range(4)))
        a, b = net(torch.stack(left), torch.stack(right))
        loss = criterion(a, b, torch.tensor(same)) / 4
        loss.backward()
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            print(f"update {micro // 4}: {loss.item() * 4:.4f}")


if __name__ == "__main__":
    main()
