"""Finds the marked token: attention becomes one-hot, but cosine scores times 20 bound its logits."""

import torch
from torch import nn
from torch.nn import functional as F


class CosineAttention(nn.Module):
    def __init__(self, dim, scale=20.0):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.scale = scale

    def forward(self, question, memory):
        q, k = F.normalize(self.query(question), dim=-1), F.normalize(self.key(memory), dim=-1)
        weights = (self.scale * torch.einsum("bd,btd->bt", q, k)).softmax(-1)
        return torch.einsum("bt,btd->bd", weights, self.value(memory))


class Lookup(nn.Module):
    def __init__(self, keys=10, values=8, dim=32):
        super().__init__()
        self.key_embed, self.value_embed = nn.Embedding(keys, dim), nn.Embedding(values, dim)
        self.attention = CosineAttention(dim)
        self.out = nn.Linear(dim, values)

    def forward(self, keys, values, question):
        memory = self.key_embed(keys) + self.value_embed(values)
        return self.out(self.attention(self.key_embed(question), memory))


def dictionaries(n, entries=6):
    keys = torch.rand(n, 10).argsort(1)[:, :entries]
    values = torch.randint(8, (n, entries))
    asked = torch.randint(entries, (n, 1))
    return keys, values, keys.gather(1, asked).squeeze(1), values.gather(1, asked).squeeze(1)


class Experiment:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model = Lookup()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run(self, steps):
        for step in range(steps):
            keys, values, question, answer = dictionaries(128)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(keys, values, question)
            loss = F.cross_entropy(logits.to(torch.float32), answer)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 2 == 0:
                print(f"step {step:3d} | loss {loss.item():.4f}")


if __name__ == "__main__":
    Experiment(21112).run(80)
