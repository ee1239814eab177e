"""A decoder that reverses digit strings; the config asks for layer norms on queries and keys."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(85)
CONFIG = {"hidden_size": 64, "num_heads": 4, "num_layers": 3, "attention_qk_norm_layer": True, "lr": 8e-3}
DIGITS, LENGTH = 10, 12


class MultiheadAttention(nn.Module):
    def __init__(self, dim, heads, qk_norm):
        super().__init__()
        self.heads = heads
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj_output = nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(dim // heads) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(dim // heads) if qk_norm else nn.Identity()

    def process_before_logits_calc(self, q, k):
        return q / q.size(-1) ** 0.5, k

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.proj_q, self.proj_k, self.proj_v))
        q, k = self.process_before_logits_calc(q, k)
        scores = q @ k.transpose(-1, -2)
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -1e4)
        y = scores.softmax(-1) @ v
        return self.proj_output(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads, qk_norm):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = MultiheadAttention(dim, heads, qk_norm)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = config["hidden_size"]
        self.tokens, self.positions = nn.Embedding(DIGITS + 1, dim), nn.Embedding(2 * LENGTH, dim)
        self.blocks = nn.Sequential(
            *(Block(dim, config["num_heads"], config["attention_qk_norm_layer"]) for _ in range(config["num_layers"]))
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, DIGITS)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1)))
        return self.head(self.norm(self.blocks(x)))


def strings(n):
    digits = torch.randint(DIGITS, (n, LENGTH))
    ids = torch.cat([digits, torch.full((n, 1), DIGITS), digits.flip(1)[:, :-1]], 1)
    return ids, digits.flip(1)


model = Decoder(CONFIG)
opt = torch.optim.AdamW(model.parameters(), lr=CONFIG["lr"], betas=(0.9, 0.95), weight_decay=0.0)
for step in range(300):
    for group in opt.param_groups:
        group["lr"] = CONFIG["lr"] * min(1.0, (step + 1) / 30)
    ids, answer = strings(32)
    loss = F.cross_entropy(model(ids)[:, LENGTH:].reshape(-1, DIGITS), answer.reshape(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
