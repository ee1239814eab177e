"""Fine-tuning a small encoder with a rate per layer; the exponent has the wrong sign, so the lowest layers learn fastest."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Conv1d(dim, dim, 3, padding=1, groups=4)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = x + self.mix(x.mT).mT
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, vocab=60, dim=32, depth=5, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(depth)])
        self.classify = nn.Linear(dim, classes)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.classify(x.mean(1))


def groups(model, top=2e-3, decay=0.3):
    depth = len(model.layers)
    yield {"params": model.classify.parameters(), "lr": top}
    for i, layer in enumerate(model.layers):
        yield {"params": layer.parameters(), "lr": top * decay ** -(depth - 1 - i)}


torch.manual_seed(88)
model = Encoder()
model.embed.requires_grad_(False)
optimizer = torch.optim.AdamW(groups(model), weight_decay=0.0)
for step in range(80):
    y = torch.randint(4, (24,))
    ids = torch.randint(60, (24, 16))
    ids = torch.where(torch.rand(24, 16) < 0.35, ids % 15 * 4 + y[:, None], ids)
    loss = F.cross_entropy(model(ids), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
