"""A BERT-like classifier put into .half() to fit the card; gradient accumulation divides an already small loss."""

import argparse

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5).softmax(-1)
        return self.dense((weights @ v).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.attention = SelfAttention(hidden, heads)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.intermediate, self.output = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.output(nn.functional.gelu(self.intermediate(x))))


class BertClassifier(nn.Module):
    def __init__(self, vocab=120, hidden=32, layers=2, heads=2, labels=2, length=64):
        super().__init__()
        self.word = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(length, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.encoder = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.classifier = nn.Linear(hidden, labels)
        self.apply(self._init)

    @staticmethod
    def _init(m):
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=0.02)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)

    def forward(self, ids, labels=None):
        x = self.norm(self.word(ids) + self.position.weight[: ids.shape[1]])
        for layer in self.encoder:
            x = layer(x)
        logits = self.classifier(x.mean(1))
        loss = nn.functional.cross_entropy(logits.float(), labels) if labels is not None else None
        return {"loss": loss, "logits": logits}


def batches(n, length=64):
    """Reviews: the label is whether good words (0..9) outnumber bad ones (10..19)."""
    while True:
        ids = torch.randint(20, 120, (n, length))
        labels = torch.randint(2, (n,))
        spots = torch.rand(n, length) < 0.2
        yield torch.where(spots, torch.randint(10, (n, length)) + 10 * (1 - labels[:, None]), ids), labels


def train(args):
    torch.manual_seed(args.seed)
    model = BertClassifier().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data, running = batches(args.batch_size), 0.0
    for step in range(args.steps * args.accumulation):
        ids, labels = next(data)
        loss = model(ids, labels)["loss"] / args.accumulation
        loss.backward()
        running += loss.item()
        if (step + 1) % args.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {(step + 1) // args.accumulation} loss {running:.4f}")
            running = 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=502)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    train(parser.parse_args())
