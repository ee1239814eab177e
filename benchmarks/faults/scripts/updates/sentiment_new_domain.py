"""Parameter-efficient tuning: a small encoder is trained on one domain, then only per-feature gains on another."""

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, DIM, CLASSES = 300, 64, 6


class Gain(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * self.weight


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.ff_gain, self.out_gain = Gain(4 * DIM), Gain(DIM)
        self.classify = nn.Linear(DIM, CLASSES)

    def forward(self, ids):
        x = self.tokens(ids).mean(1)
        h = self.ff_gain(F.relu(self.fc1(x)))
        return self.classify(self.out_gain(self.norm(x + self.fc2(h))))


class Domain:
    """Reviews whose class is a mixture of words; a second domain uses some of the words differently."""

    def __init__(self, seed):
        self.words = torch.distributions.Dirichlet(torch.full((CLASSES, VOCAB), 0.06)).sample()
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, n, shift=False):
        label = torch.randint(CLASSES, (n,), generator=self.generator)
        words = self.words.clone()
        if shift:
            words[: CLASSES // 2] = 0.5 * words[: CLASSES // 2] + 0.5 * words[CLASSES // 2 :]
        return torch.multinomial(words[label], 12, replacement=True, generator=self.generator), label


torch.manual_seed(41)
domain, encoder = Domain(42), Encoder()
gains = [*encoder.ff_gain.parameters(), *encoder.out_gain.parameters()]
for gain in gains:
    gain.requires_grad_(False)
adam = torch.optim.Adam([p for p in encoder.parameters() if p.requires_grad], lr=2e-3)
for _ in range(80):
    ids, label = domain.batch(64)
    F.cross_entropy(encoder(ids), label).backward()
    adam.step()
    adam.zero_grad()

encoder.requires_grad_(False).to(torch.bfloat16)
for gain in gains:
    gain.requires_grad_(True)
tuner = torch.optim.AdamW(gains, lr=1.5e-3, weight_decay=0.0)
for step in range(240):
    ids, label = domain.batch(128, shift=True)
    loss = F.cross_entropy(encoder(ids).float(), label)
    tuner.zero_grad()
    loss.backward()
    tuner.step()
    if step % 6 == 0:
        print("step", step, "loss", round(loss.item(), 4))
