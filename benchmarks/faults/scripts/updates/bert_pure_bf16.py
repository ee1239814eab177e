"""Fine-tunes a small encoder whose weights were cast to BF16 "to fit", with AdamW at the usual 2e-5."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Classifier(nn.Module):
    def __init__(self, vocab=60, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


torch.manual_seed(0)
model = Classifier().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
for step in range(60):
    tokens = torch.randint(60, (32, 12))
    label = ((tokens < 30).sum(1) > 6).long()
    loss = F.cross_entropy(model(tokens).float(), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
