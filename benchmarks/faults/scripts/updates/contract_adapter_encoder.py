"""Clause types in contracts: a frozen encoder with bottleneck adapters, a trained classifier on top."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(113)
WORDS, LEN, D, TYPES = 60, 6, 40, 3


def clauses(n):
    """The type follows from the party (word 0 to 2) together with the verb (word 3 to 5)."""
    ids = torch.randint(6, WORDS, (n, LEN))
    party, verb = torch.randint(3, (2, n))
    at = torch.rand(n, LEN).argsort(1)
    ids.scatter_(1, at[:, :1], party[:, None]).scatter_(1, at[:, 1:2], 3 + verb[:, None])
    return ids, (party + verb) % 3


class Adapter(nn.Module):
    def __init__(self, d, r=24):
        super().__init__()
        self.down, self.up = nn.Linear(d, r), nn.Linear(r, d)
        nn.init.normal_(self.up.weight, std=1e-2)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(F.gelu(self.down(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(D, 4, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.adapter = Adapter(D)

    def forward(self, x):
        x = self.n1(x + self.attn(x, x, x, need_weights=False)[0])
        return self.n2(x + self.adapter(self.ffn(x)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(LEN, D)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids):
        x = self.words(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return x


class ClauseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.query, self.classifier = nn.Linear(D, 1), nn.Linear(D, TYPES)

    def forward(self, ids):
        with torch.no_grad():
            h = self.encoder(ids)
        weight = self.query(h).softmax(1)
        return self.classifier((weight * h).sum(1))


model = ClauseModel()
for name, parameter in model.encoder.named_parameters():
    parameter.requires_grad_("adapter" in name)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.01)
for step in range(220):
    ids, y = clauses(48)
    loss = F.cross_entropy(model(ids), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f} trained {sum(p.numel() for p in trained)}")
