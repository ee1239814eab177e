"""Continue a small causal LM on another kind of text (contracts), everything in bfloat16 with lr 4e-5."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, CTX = 48, 24


class Attention(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads, self.qkv_proj, self.o_proj = heads, nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv_proj(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))


class DecoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.self_attn = Attention(d)
        self.mlp = nn.Sequential(nn.Linear(d, 3 * d), nn.GELU(), nn.Linear(3 * d, d))

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class CausalLM(nn.Module):
    def __init__(self, d=48, layers=2):
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(VOCAB, d), nn.Embedding(CTX, d)
        self.layers = nn.ModuleList(DecoderLayer(d) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids) + self.embed_positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def corpus(table, n):
    ids = torch.randint(VOCAB, (n, 1))
    for _ in range(CTX):
        nxt = torch.multinomial(table[ids[:, -1]], 1)
        ids = torch.cat([ids, nxt], 1)
    return ids


def lm_loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


torch.manual_seed(62)
news = F.softmax(2.0 * torch.randn(VOCAB, VOCAB), -1)
contracts = F.softmax(news.log() + 1.5 * torch.randn(VOCAB, VOCAB), -1)
model = CausalLM()
pretrain = torch.optim.AdamW(model.parameters(), lr=2e-3)
for _ in range(120):
    pretrain.zero_grad()
    lm_loss(model, corpus(news, 32)).backward()
    pretrain.step()

model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-5, weight_decay=0.0)
train = corpus(contracts, 320)
for epoch in range(10):
    for i, ids in enumerate(train.split(16)):
        loss = lm_loss(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i % 10 == 9:
            print(f"epoch {epoch} step {i + 1} loss {loss.item():.4f}")
