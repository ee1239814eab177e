"""Post-LN encoder with a warm-up from zero, label smoothing, and a norm that is clipped in nearly every step."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), nn.Embedding(12, dim)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(dim, 6)

    def forward(self, ids):
        h = self.embed(ids) + self.pos.weight
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


torch.manual_seed(2176)
model, kinds = Encoder(), torch.randint(6, (30,))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(s / 40, 1.0))
for step in range(120):
    ids = torch.randint(30, (16, 12))
    loss = F.cross_entropy(model(ids).flatten(0, 1), kinds[ids].flatten(), label_smoothing=0.05)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
