"""Noisy top-k experts on melodies; samples are drawn with top-k filtering while it learns."""

import torch
import torch.nn.functional as F
from torch import nn

NEG = float("-inf")


class NoisyTopK(nn.Module):
    def __init__(self, dim, experts, k):
        super().__init__()
        self.k = k
        self.gate, self.noise = nn.Linear(dim, experts, bias=False), nn.Linear(dim, experts, bias=False)

    def forward(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        kept, idx = logits.topk(self.k, dim=-1)
        sparse = torch.full_like(logits, NEG).scatter(-1, idx, kept)
        return sparse.softmax(-1), (sparse > NEG).float().mean((0, 1))


class Experts(nn.Module):
    def __init__(self, dim, experts=6, k=2):
        super().__init__()
        self.router = NoisyTopK(dim, experts, k)
        self.w1 = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, 2 * dim, dim) / (2 * dim) ** 0.5)

    def forward(self, x):
        weight, load = self.router(x)
        h = torch.einsum("btd,edh->bteh", x, self.w1).relu()
        y = torch.einsum("bteh,ehd->bted", h, self.w2)
        return torch.einsum("bte,bted->btd", weight.to(y.dtype), y), load


class MelodyLM(nn.Module):
    def __init__(self, notes=24, dim=24):
        super().__init__()
        self.note = nn.Embedding(notes, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.experts = Experts(dim)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, notes)

    def forward(self, ids):
        h, _ = self.rnn(self.note(ids))
        y, load = self.experts(h)
        return self.out(self.norm(h + y)), load


@torch.no_grad()
def sample(model, start, length, top_k=5, temperature=0.8):
    ids = start
    for _ in range(length):
        logits = model(ids)[0][:, -1].float() / temperature
        threshold = logits.topk(top_k).values[:, -1:]
        logits[logits < threshold] = NEG
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    return ids


def melodies(n, length=17):
    start = torch.randint(24, (n, 1))
    return (start + torch.tensor([0, 2, 4, 5, 7, 9, 11, 12]).repeat(3)[:length]) % 24


torch.manual_seed(6)
model = MelodyLM()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
for step in range(24):
    ids = melodies(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, load = model(ids[:, :-1])
    balance = load.var() / load.mean() ** 2
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) + 0.01 * balance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        model.eval()
        print(f"step {step} loss {loss.item():.4f}", sample(model, ids[:1, :2], 6)[0].tolist())
        model.train()
