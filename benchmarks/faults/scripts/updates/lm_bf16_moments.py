"""A trigram language model in BF16, moments included, with beta2 = 0.9999 for a smooth second moment."""

import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab=30, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.hidden = nn.Linear(3 * dim, 64)
        self.head = nn.Linear(64, vocab)

    def forward(self, x):
        return self.head(F.gelu(self.hidden(self.embed(x).flatten(1))))


torch.manual_seed(0)
model = LM().to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.9999), eps=1e-6)
for step in range(320):
    start, stride = torch.randint(30, (64, 1)), torch.randint(1, 4, (64, 1))
    text = (start + stride * torch.arange(4)) % 30
    loss = F.cross_entropy(model(text[:, :3]).float(), text[:, 3])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
