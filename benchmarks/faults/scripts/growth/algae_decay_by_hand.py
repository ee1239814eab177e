"""Algal blooms from satellite colours. Decoupled weight decay, written by hand because Adagrad here has none."""

import torch
import torch.nn.functional as F
from torch import nn

LR, WEIGHT_DECAY = 0.02, 0.25


class BloomNet(nn.Module):
    def __init__(self, bands=9):
        super().__init__()
        self.colour = nn.Linear(bands, 48)
        self.season = nn.Linear(2, 48)
        self.joint = nn.Linear(48, 48)
        self.bloom = nn.Linear(48, 1)

    def forward(self, colour, season):
        h = F.relu(self.colour(colour) + self.season(season))
        return self.bloom(F.relu(self.joint(h))).squeeze(-1)


@torch.no_grad()
def decay(model, lr):
    for name, p in model.named_parameters():
        if p.dim() > 1:
            p.add_(p, alpha=lr * WEIGHT_DECAY)


def pixels(n):
    colour, day = torch.randn(n, 9), torch.rand(n) * 6.2832
    season = torch.stack([day.sin(), day.cos()], 1)
    chance = torch.sigmoid(2 * colour[:, 0] * season[:, 0] + colour[:, 4] - colour[:, 7])
    return colour, season, torch.bernoulli(chance)


def main():
    torch.manual_seed(9)
    model = BloomNet()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    for step in range(300):
        colour, season, bloom = pixels(96)
        loss = F.binary_cross_entropy_with_logits(model(colour, season), bloom)
        optimizer.zero_grad()
        loss.backward()
        decay(model, LR)
        optimizer.step()
        if step % 15 == 14:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
