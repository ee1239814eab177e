"""A BF16 encoder over heavily padded sentences: -inf masks, three quarters of the positions without any gradient."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocab=80, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.tag = nn.Linear(dim, 4)

    def forward(self, tokens):
        padding = tokens == 0
        mask = torch.zeros(tokens.shape).masked_fill(padding, float("-inf"))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=mask)
        return self.tag(x)


torch.manual_seed(0)
model = Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(60):
    tokens = torch.randint(1, 80, (16, 32))
    lengths = torch.randint(2, 12, (16, 1))
    lengths[0] = 32
    tokens[torch.arange(32) >= lengths] = 0
    tags = torch.where(tokens == 0, -100, tokens % 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens)
    loss = F.cross_entropy(logits.float().flatten(0, 1), tags.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
