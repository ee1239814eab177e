"""An LSTM whose gradient is clipped in every step, by a factor of ten and more: a choice."""

import torch
import torch.nn.functional as F
from torch import nn


class Melody(nn.Module):
    def __init__(self, notes=24, dim=32):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(notes, dim), nn.LSTM(dim, 48, 2, batch_first=True)
        self.out = nn.Linear(48, notes)

    def forward(self, x):
        return self.out(self.lstm(self.embed(x))[0])


torch.manual_seed(0)
model = Melody()
optimizer = torch.optim.SGD(model.parameters(), lr=3.0, momentum=0.9)
for step in range(80):
    start, stride = torch.randint(24, (32, 1)), torch.randint(1, 3, (32, 1))
    tune = (start + stride * torch.arange(17)) % 24
    logits = model(tune[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tune[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.02)
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
