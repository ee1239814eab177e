import torch
import torch.nn as nn


class Tagger(nn.Module):
    """Tags and glosses of words from their neighbours."""

    def __init__(self, vocabulary=60, width=32, tags=6, glosses=12):
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Conv1d(width, 48, 3, padding=1)
        self.tags = nn.Linear(48, tags)
        self.gloss = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, glosses))

    def forward(self, tokens, shift=None):
        e = self.embed(tokens)
        e = e if shift is None else e + shift
        h = torch.relu(self.mix(e.transpose(1, 2))).transpose(1, 2)
        return self.tags(h), self.gloss(h)
