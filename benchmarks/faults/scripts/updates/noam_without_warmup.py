"""Sorting digits with a small encoder, FP32; the inverse-root schedule has lost its warm-up, and begins at 0.6."""

import torch
import torch.nn.functional as F
from torch import nn

WARMUP = 1


class Encoder(nn.Module):
    def __init__(self, vocab=16, dim=32, length=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.place = nn.Parameter(0.02 * torch.randn(length, dim))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.norm(self.encoder(self.embed(x) + self.place)))


def rate(step):
    step += 1
    return 0.6 * min(step**-0.5, step * WARMUP**-1.5)


torch.manual_seed(14)
model = Encoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
for step in range(150):
    x = torch.randint(16, (32, 10))
    loss = F.cross_entropy(model(x).flatten(0, 1), x.sort(1).values.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
