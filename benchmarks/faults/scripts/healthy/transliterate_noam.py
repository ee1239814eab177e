"""Transliteration with a causal decoder; warm-up from a rate of zero as in the original Transformer."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Decoder(nn.Module):
    def __init__(self, vocab=30, dim=48, length=17):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))
        layer = nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        n = ids.shape[1]
        x = self.embed(ids) + self.position[:n]
        return self.out(self.layers(x, mask=self.mask[:n, :n]))


def words(n, table):
    source = torch.randint(1, 14, (n, 8))
    lengths = torch.randint(4, 9, (n, 1))
    keep = torch.arange(8) < lengths
    source = source * keep
    target = torch.where(keep, table[source], 0)
    return torch.cat([source, torch.full((n, 1), 29), target], 1)


torch.manual_seed(55)
table = torch.randperm(14) + 14
model = Decoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
warmup = 60
rate = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda s: 0.0 if s == 0 else 0.25 * 48**-0.5 * min(s**-0.5, s * warmup**-1.5)
)
for step in range(180):
    ids = words(48, table)
    target = ids[:, 9:]
    logits = model(ids[:, :-1])[:, 8:]
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    rate.step()
    if step % 6 == 0:
        print(f"step {step} lr {rate.get_last_lr()[0]:.2e} loss {loss.item():.4f}")
