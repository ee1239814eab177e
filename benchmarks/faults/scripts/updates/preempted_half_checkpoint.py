"""A job that is pre-empted and resumed. To save disk, the checkpoint is written in half precision, optimizer and all."""

import io

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, CONTEXT = 200, 16


class LanguageModel(nn.Module):
    def __init__(self, emb=32, hidden=64):
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, emb)
        self.rnn = nn.GRU(emb, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, VOCAB)

    def forward(self, ids):
        return self.decoder(self.rnn(self.encoder(ids))[0])


def shrink(tree):
    """FP32 tensors to half: the files get half as large."""
    if isinstance(tree, dict):
        return {k: shrink(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [shrink(v) for v in tree]
    if isinstance(tree, torch.Tensor) and tree.is_floating_point() and tree.dim() > 0:
        return tree.half()
    return tree


class Run:
    def __init__(self):
        self.model = LanguageModel()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.step = 0

    def save(self):
        file = io.BytesIO()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(shrink(state), file)
        file.seek(0)
        return file

    def resume(self, file):
        state = torch.load(file)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        return self

    def train(self, until, grammar):
        while self.step < until:
            ids = text(16, grammar)
            loss = F.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            if self.step % 2 == 0:
                print(f"step {self.step} loss {loss.item():.4f}")


def text(n, grammar):
    """Rare words are rare."""
    word = (VOCAB * torch.rand(n) ** 2).long()
    words = [word]
    for _ in range(CONTEXT):
        fresh = (VOCAB * torch.rand(n) ** 2).long()
        word = torch.where(torch.rand(n) < 0.8, grammar[word], fresh)
        words.append(word)
    return torch.stack(words, 1)


if __name__ == "__main__":
    torch.manual_seed(610)
    grammar = torch.randperm(VOCAB)
    first = Run()
    first.train(90, grammar)
    checkpoint = first.save()
    del first
    Run().resume(checkpoint).train(120, grammar)
