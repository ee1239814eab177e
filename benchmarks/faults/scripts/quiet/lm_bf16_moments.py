"""A recurrent language model in BF16, moments included, with beta2 = 0.9999 for a smooth second moment."""

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.norm(self.rnn(self.embed(x))[0]))


torch.manual_seed(0)
model = LM().to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.9999))
for step in range(90):
    start, stride = torch.randint(30, (16, 1)), torch.randint(1, 4, (16, 1))
    text = (start + stride * torch.arange(13)) % 30
    loss = F.cross_entropy(model(text[:, :-1]).float().flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
