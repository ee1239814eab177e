"""Image-caption pairs: InfoNCE at temperature 0.07, on embeddings that nobody normalises."""

import torch
import torch.nn.functional as F
from torch import nn


class DualEncoder(nn.Module):
    def __init__(self, dim=64, temperature=0.07):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(40, 96), nn.GELU(), nn.Linear(96, dim))
        self.text = nn.Sequential(nn.Linear(30, 96), nn.GELU(), nn.Linear(96, dim))
        self.temperature = temperature

    def forward(self, image, text):
        i, t = unit(self.image(image)), unit(self.text(text))
        return i @ t.t() / self.temperature


def unit(x):
    return x.float()


def pairs(n, a, b):
    z = torch.randn(n, 12)
    return z @ a + torch.randn(n, 40), z @ b + torch.randn(n, 30)


def main():
    torch.manual_seed(71)
    a, b = torch.randn(12, 40), torch.randn(12, 30)
    model = DualEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(200):
        logits = model(*pairs(64, a, b))
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
