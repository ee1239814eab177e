"""Images and captions, contrasted with a learned temperature that is clamped at 100, as CLIP does."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Clip(nn.Module):
    def __init__(self, image=32, text=24, dim=24):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(image, 64), nn.GELU(), nn.Linear(64, dim))
        self.text = nn.Sequential(nn.Linear(text, 64), nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, captions):
        a, b = F.normalize(self.image(images), dim=-1), F.normalize(self.text(captions), dim=-1)
        return self.logit_scale.exp() * a @ b.t()


class Pairs:
    def __init__(self, concepts=10):
        self.to_image, self.to_text = torch.randn(concepts, 32), torch.randn(concepts, 24)
        self.concepts = concepts

    def __call__(self, n):
        concept = torch.randn(n, self.concepts)
        images = concept @ self.to_image + 0.1 * torch.randn(n, 32)
        captions = torch.tanh(concept @ self.to_text / 3) + 0.05 * torch.randn(n, 24)
        return images / 3, captions


def symmetric(logits):
    targets = torch.arange(len(logits))
    return 0.5 * (F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets))


def main():
    torch.manual_seed(21106)
    pairs, model = Pairs(), Clip()
    towers = [*model.image.parameters(), *model.text.parameters()]
    optimizer = torch.optim.AdamW(
        [{"params": towers, "lr": 3e-3}, {"params": [model.logit_scale], "lr": 0.1, "weight_decay": 0.0}]
    )
    for step in range(70):
        images, captions = pairs(64)
        loss = symmetric(model(images, captions))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(max=math.log(100.0))
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f} temperature {model.logit_scale.exp().item():.1f}")


if __name__ == "__main__":
    main()
