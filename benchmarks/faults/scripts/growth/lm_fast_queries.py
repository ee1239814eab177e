"""A causal language model whose query and key projections have a learning rate of their own."""

import torch
from torch import nn
from torch.nn import functional as F

CONFIG = {"dim": 48, "heads": 4, "layers": 2, "vocab": 24, "length": 32, "lr": 2e-3, "qk_lr_factor": 40.0}


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.value, self.proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.scores = nn.Identity()

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = self.scores(q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5)
        future = torch.ones(t, t, dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -1e9).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, dim, heads, layers, vocab, length, **_):
        super().__init__()
        self.embed, self.position = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sentences(n, table, length):
    """Second-order Markov chains over the vocabulary."""
    ids = torch.randint(len(table), (n, 2))
    while ids.shape[1] <= length:
        nxt = table[ids[:, -1], ids[:, -2]]
        noise = torch.rand(n) < 0.1
        ids = torch.cat([ids, torch.where(noise, torch.randint(len(table), (n,)), nxt)[:, None]], 1)
    return ids


def parameter_groups(model, lr, qk_lr_factor, **_):
    qk = [p for n, p in model.named_parameters() if ".query." in n or ".key." in n]
    rest = [p for n, p in model.named_parameters() if ".query." not in n and ".key." not in n]
    return [{"params": rest, "lr": lr}, {"params": qk, "lr": lr * qk_lr_factor}]


def main():
    torch.manual_seed(21001)
    model = LanguageModel(**CONFIG)
    optimizer = torch.optim.AdamW(parameter_groups(model, **CONFIG), betas=(0.9, 0.95), weight_decay=0.01)
    table = torch.randint(CONFIG["vocab"], (CONFIG["vocab"], CONFIG["vocab"]))
    table[6:] = table[:6].repeat(3, 1)
    for step in range(70):
        ids = sentences(24, table, CONFIG["length"])
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 2 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
