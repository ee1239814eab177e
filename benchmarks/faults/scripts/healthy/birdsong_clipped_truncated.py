"""Syllables of birdsong, truncated back-propagation with carried states; SGD with rate 8 whose steps are all clipped."""

import torch
import torch.nn.functional as F
from torch import nn


class SongModel(nn.Module):
    def __init__(self, syllables=12, width=40):
        super().__init__()
        self.embed = nn.Embedding(syllables, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, syllables)

    def forward(self, song, state):
        h, state = self.lstm(self.embed(song), state)
        return self.out(h), tuple(s.detach() for s in state)


def songs(n, length):
    motif = torch.randperm(12).repeat(length // 12 + 2)
    start = torch.randint(12, (n,))
    song = torch.stack([motif[s : s + length + 1] for s in start.tolist()])
    return torch.where(torch.rand(song.shape) < 0.05, torch.randint(12, song.shape), song)


torch.manual_seed(112)
song = songs(24, 1440)
model, state = SongModel(), None
optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
for chunk in range(120):
    part = song[:, chunk * 12 : chunk * 12 + 13]
    logits, state = model(part[:, :-1], state)
    loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    if chunk % 6 == 5:
        print(f"chunk {chunk + 1} loss {loss.item():.4f} norm {norm:.2f}")
