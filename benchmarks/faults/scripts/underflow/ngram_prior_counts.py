"""A small network on top of bigram counts, which are collected as training goes."""

import torch
from torch import nn


class Bigrams(nn.Module):
    """log P(next | word) of everything read so far, with one imagined occurrence of each pair."""

    def __init__(self, vocab, dtype=torch.bfloat16):
        super().__init__()
        self.vocab = vocab
        self.register_buffer("counts", torch.ones(vocab * vocab, dtype=dtype))

    @torch.no_grad()
    def read(self, words, following):
        pairs = (words * self.vocab + following).flatten()
        self.counts.index_add_(0, pairs, torch.ones(len(pairs), dtype=self.counts.dtype))

    def forward(self, words):
        table = self.counts.to(torch.float32).view(self.vocab, self.vocab)
        return (table / table.sum(1, keepdim=True)).log()[words]


class Hybrid(nn.Module):
    """Corrects the bigrams by the word before."""

    def __init__(self, vocab, dim=16):
        super().__init__()
        self.bigrams = Bigrams(vocab)
        self.before = nn.Embedding(vocab, dim)
        self.correction = nn.Linear(dim, vocab)
        nn.init.zeros_(self.correction.weight)

    def forward(self, words, before):
        return self.bigrams(words) + self.correction(torch.tanh(self.before(before)))


def read_text(n, length, table):
    vocab = len(table)
    words = torch.randint(vocab, (n, 2))
    for _ in range(length):
        likely = table[words[:, -1]]
        other = torch.randint(vocab, (n,))
        words = torch.cat([words, torch.where(torch.rand(n) < 0.95, likely, other)[:, None]], 1)
    return words


def main():
    torch.manual_seed(21007)
    vocab = 8
    table = torch.randperm(vocab)
    model = Hybrid(vocab)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    read = 0
    for step in range(60):
        words = read_text(64, 40, table)
        before, word, following = words[:, :-2], words[:, 1:-1], words[:, 2:]
        logits = model(word, before)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.bigrams.read(word, following)
        read += word.numel()
        print(f"step {step:2d} read {read} loss {loss.item():.4f}")
    return model, read


if __name__ == "__main__":
    model, read = main()
