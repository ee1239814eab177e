"""Tied input and output embeddings, 4000 words of which a hundred occur; sampled negatives, so most rows get no gradient."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TiedLM(nn.Module):
    def __init__(self, vocab=4000, d=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.proj = nn.Linear(d, d)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids, candidates):
        h = F.normalize(self.proj(self.rnn(self.embed(ids))[0]), dim=-1)
        return self.log_scale.exp() * h @ F.normalize(self.embed(candidates), dim=-1).t()


def text(n, length, successor, words):
    ids = [torch.randint(words, (n,))]
    for _ in range(length):
        ids.append(torch.where(torch.rand(n) < 0.1, torch.randint(words, (n,)), successor[ids[-1]]))
    return torch.stack(ids, 1)


def main(words=100):
    torch.manual_seed(7033)
    successor = torch.randperm(words)
    model = TiedLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(80):
        ids = text(16, 12, successor, words)
        present = ids.unique()
        negatives = torch.randint(4000, (64,))
        candidates = torch.cat([present, negatives])
        target = torch.searchsorted(present, ids[:, 1:].flatten())
        logits = model(ids[:, :-1], candidates).flatten(0, 1)
        loss = F.cross_entropy(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f} scale {model.log_scale.exp().item():.2f}")


main()
