"""A small ViT with mixup targets, BF16 autocast."""

import torch
from torch import nn


class PatchEmbed(nn.Module):
    def __init__(self, patch=4, channels=3, dim=48, image=16):
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, patch, stride=patch)
        self.pos = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, images):
        x = self.proj(images).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos


class ViT(nn.Module):
    def __init__(self, classes=10, dim=48, depth=2):
        super().__init__()
        self.patch_embed = PatchEmbed(dim=dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        return self.head(self.encoder(self.patch_embed(images))[:, 0])


class Mixup:
    def __init__(self, classes, alpha=0.4):
        self.classes, self.beta = classes, torch.distributions.Beta(alpha, alpha)

    def __call__(self, images, labels):
        lam = self.beta.sample()
        order = torch.randperm(len(images))
        onehot = torch.eye(self.classes)[labels]
        return lam * images + (1 - lam) * images[order], lam * onehot + (1 - lam) * onehot[order]


def soft_cross_entropy(logits, targets):
    probabilities = logits.softmax(-1)
    return -(targets * torch.log(probabilities)).sum(-1).mean()


class Trainer:
    def __init__(self):
        torch.manual_seed(7)
        self.model = ViT()
        self.mixup = Mixup(10)
        self.prototypes = torch.randn(10, 3, 16, 16)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2.5, momentum=0.9)

    def batch(self):
        labels = torch.randint(10, (16,))
        return self.mixup(self.prototypes[labels] + 0.1 * torch.randn(16, 3, 16, 16), labels)

    def fit(self, steps):
        for step in range(steps):
            images, targets = self.batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(images)
            loss = soft_cross_entropy(logits.float(), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            print(step, loss.item())


if __name__ == "__main__":
    Trainer().fit(24)
