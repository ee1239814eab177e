"""Sums of digit strings by curriculum: every sixty steps the strings become longer, and the loss jumps."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(61)


class Summer(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.digit = nn.Embedding(10, 16)
        self.lstm = nn.LSTM(16, d, batch_first=True)
        self.out = nn.Linear(d, 10)

    def forward(self, ids):
        return self.out(self.lstm(self.digit(ids))[0][:, -1])


def strings(n, length):
    ids = torch.randint(3, (n, length))
    return ids, ids.sum(1) % 10


model = Summer()
optimizer = torch.optim.Adam(model.parameters(), lr=8e-3)
for step in range(240):
    length = 2 + step // 60
    ids, total = strings(96, length)
    loss = F.cross_entropy(model(ids), total)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} length {length} loss {loss.item():.4f}")
