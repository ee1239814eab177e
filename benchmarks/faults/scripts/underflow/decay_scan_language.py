"""Gated linear recurrence h_t = a_t h_{t-1} + (1 - a_t) v_t, all steps at once by cumulative products."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def parallel_scan(a, b):
    decay = torch.cumprod(a, dim=1)
    inverse = 1.0 / decay.clamp(min=1e-12)
    return decay * torch.cumsum(b * inverse, dim=1)


class GatedRecurrence(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.to_gate = nn.Linear(dim, dim)
        self.to_value = nn.Linear(dim, dim)

    def forward(self, x):
        a = torch.sigmoid(self.to_gate(x))
        return parallel_scan(a, (1 - a) * self.to_value(x))


class Model(nn.Module):
    def __init__(self, vocab=24, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = GatedRecurrence(dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(self.norm(x + self.mix(x)))


def sequences(n, length=96):
    ids = torch.randint(0, 24, (n, length))
    for t in range(3, length):
        same = torch.rand(n) < 0.8
        ids[:, t] = torch.where(same, (ids[:, t - 1] + ids[:, t - 2]) % 24, ids[:, t])
    return ids


if __name__ == "__main__":
    torch.manual_seed(17)
    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    data = sequences(512)
    for step in range(100):
        ids = data[torch.randint(0, 512, (16,))]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss:.4f}")
