"""Mostly padding, half of the units dropped, and a frozen encoder: gradients are zero nearly everywhere."""

import torch
from torch import nn


class FrozenEncoder(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.words = nn.Embedding(vocab, dim, padding_idx=0)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        self.requires_grad_(False)

    def forward(self, ids):
        x = self.words(ids)
        return x + torch.relu(self.mix(x.transpose(1, 2))).transpose(1, 2)


class Sentiment(nn.Module):
    def __init__(self, dim=32, classes=3):
        super().__init__()
        self.encoder = FrozenEncoder(dim=dim)
        self.adapter = nn.Sequential(nn.Dropout(0.5), nn.Linear(dim, 48), nn.ReLU(), nn.Dropout(0.5))
        self.score, self.out = nn.Linear(48, 1), nn.Linear(48, classes)

    def forward(self, ids):
        keep = ids != 0
        x = self.adapter(self.encoder(ids))
        weight = self.score(x).squeeze(-1).masked_fill(~keep, float("-inf")).softmax(1)
        return self.out((weight.unsqueeze(-1) * x * keep.unsqueeze(-1)).sum(1))


class Reviews:
    """A few words in forty places; three ranges of the vocabulary speak for the three classes."""

    def __init__(self, length=40):
        self.length = length

    def batch(self, n):
        label = torch.randint(3, (n,))
        words = torch.randint(1, 50, (n, self.length))
        telling = 1 + 16 * label[:, None] + torch.randint(16, (n, self.length))
        ids = torch.where(torch.rand(n, self.length) < 0.6, telling, words)
        lengths = torch.randint(3, 9, (n, 1))
        return torch.where(torch.arange(self.length) < lengths, ids, 0), label


class PrintLoss:
    def __call__(self, step, loss):
        if step % 2 == 0:
            print(f"iteration {step}: loss {loss:.4f}")


def fit(model, reviews, steps, callbacks):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    for step in range(steps):
        ids, label = reviews.batch(64)
        loss = nn.functional.cross_entropy(model(ids), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for callback in callbacks:
            callback(step, loss.item())


if __name__ == "__main__":
    torch.manual_seed(21108)
    fit(Sentiment(), Reviews(), 80, [PrintLoss()])
