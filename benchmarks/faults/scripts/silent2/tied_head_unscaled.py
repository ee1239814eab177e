"""A GRU language model with tied input and output embeddings, trained in BF16 autocast."""

import torch
from torch import nn


class TiedHead(nn.Module):
    """Scores every word by its own embedding."""

    def __init__(self, embedding, multiplier):
        super().__init__()
        self.embedding, self.multiplier = embedding, multiplier

    def forward(self, hidden):
        return self.multiplier * nn.functional.linear(hidden, self.embedding.weight)


class WordModel(nn.Module):
    def __init__(self, vocab=60, dim=64, multiplier=1.0):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = TiedHead(self.embedding, multiplier)

    def forward(self, words):
        hidden, _ = self.rnn(self.embedding(words))
        return self.head(self.norm(hidden))


class Corpus:
    """Words follow one another in topics."""

    def __init__(self, vocab):
        self.vocab = vocab
        self.following = torch.randint(vocab, (vocab, 3))

    def batch(self, n, length):
        words = [torch.randint(self.vocab, (n,))]
        for _ in range(length):
            words.append(self.following[words[-1], torch.randint(3, (n,))])
        return torch.stack(words, 1)


class Trainer:
    def __init__(self, model, corpus, lr, steps):
        self.model, self.corpus, self.steps = model, corpus, steps
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.2, 1.0, total_iters=10)
        self.history = []

    def loss(self, words):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(words[:, :-1])
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())

    def fit(self):
        for step in range(self.steps):
            loss = self.loss(self.corpus.batch(16, 20))
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.history.append(loss.item())
            if step % 2 == 0:
                print(f"[{step}] loss={self.history[-1]:.4f} lr={self.schedule.get_last_lr()[0]:.1e}")


if __name__ == "__main__":
    torch.manual_seed(21002)
    corpus = Corpus(60)
    Trainer(WordModel(), corpus, lr=0.01, steps=60).fit()
