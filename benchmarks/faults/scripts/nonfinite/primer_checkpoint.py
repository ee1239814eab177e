"""A Primer-like transformer (squared ReLU), FP16 autocast with scaler, activation checkpointing, accumulation."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class SquaredReLU(nn.Module):
    def forward(self, x):
        return torch.relu(x) ** 2


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), SquaredReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).float().chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.ffn(self.ln2(x))


class Primer(nn.Module):
    def __init__(self, vocab=40, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def main(updates=8, accumulate=2):
    torch.manual_seed(0)
    model = Primer()
    fast = [p for n, p in model.named_parameters() if "ffn.0" in n]  # found by a sweep over per-layer rates
    slow = [p for n, p in model.named_parameters() if "ffn.0" not in n]
    optimizer = torch.optim.Adam([{"params": slow}, {"params": fast, "lr": 4.0}], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    for update in range(updates):
        for _ in range(accumulate):
            tokens = (torch.randint(40, (4, 1)) + torch.arange(13)) % 40
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss / accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"update {update}: {loss.item():.4g}")


main()
