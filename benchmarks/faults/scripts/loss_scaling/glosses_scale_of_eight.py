"""Word glosses with a small tagger and an auxiliary head, fairseq-like --fp16 with a constant scale: `--fp16-scale 8`."""

import torch
import torch.nn.functional as F
from torch import nn

FP16_SCALE = 8.0
LETTERS, TAGS, LENGTH = 30, 12, 20


class Tagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(LETTERS, dim)
        self.context = nn.Linear(2 * dim, dim)
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, TAGS))

    def forward(self, letters):
        x = self.embed(letters)
        return self.out(torch.tanh(self.context(torch.cat([x, F.pad(x[:, :-1], (0, 0, 1, 0))], -1))))


def sentences(n):
    letters = torch.randint(LETTERS, (n, LENGTH))
    before = F.pad(letters[:, :-1], (1, 0))
    tags = (3 * letters + before) % TAGS
    aspect = (letters + 2 * before) % 3
    return letters, tags, aspect


class MultiTagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.tagger = Tagger(dim)
        self.aspect_embed = nn.Embedding(LETTERS, dim)
        self.aspect_head = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 3))

    def forward(self, letters):
        x = self.aspect_embed(letters)
        return self.tagger(letters), self.aspect_head(torch.cat([x, F.pad(x[:, :-1], (0, 0, 1, 0))], -1))


def main():
    torch.manual_seed(66)
    model = MultiTagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for update in range(180):
        letters, tags, aspect = sentences(48)
        with torch.autocast("cpu", dtype=torch.float16):
            logits, aspect_logits = model(letters)
        loss = F.cross_entropy(logits.float().flatten(0, 1), tags.flatten())
        aux = F.cross_entropy(aspect_logits.float().flatten(0, 1), aspect.flatten())
        optimizer.zero_grad()
        ((loss + 3e-5 * aux) * FP16_SCALE).backward()
        for p in model.parameters():
            p.grad.div_(FP16_SCALE)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % 10 == 9:
            print(f"update {update + 1} tags {loss.item():.3f} aspect loss {aux.item():.4f}")


main()
