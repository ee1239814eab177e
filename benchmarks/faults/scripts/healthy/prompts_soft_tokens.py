"""Prompt tuning: a BF16 language model is frozen, and eight soft tokens in FP32 are trained with a large rate."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 40


class TinyLM(nn.Module):
    def __init__(self, dim=48, layers=2):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(40, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, vectors):
        t = vectors.shape[1]
        x = vectors + self.position.weight[:t].to(vectors.dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(t, dtype=x.dtype)
        return self.head(self.norm(self.blocks(x, mask=mask, is_causal=True)))


class SoftPrompt(nn.Module):
    def __init__(self, lm, tokens=8):
        super().__init__()
        self.lm = lm.requires_grad_(False)
        self.prompt = nn.Parameter(lm.embed.weight[torch.randint(VOCAB, (tokens,))].detach().float())

    def forward(self, ids):
        vectors = self.lm.embed(ids)
        prompt = self.prompt.to(vectors.dtype).expand(len(ids), -1, -1)
        return self.lm(torch.cat([prompt, vectors], 1))[:, len(self.prompt) :].float()


def text(n, stride, length=16):
    return (torch.randint(VOCAB, (n, 1)) + stride * torch.arange(length)) % VOCAB


torch.manual_seed(359)
lm = TinyLM()
pretraining = torch.optim.Adam(lm.parameters(), lr=3e-3)
for _ in range(80):
    ids = text(16, torch.randint(1, 6, (16, 1)))
    logits = lm(lm.embed(ids[:, :-1]))
    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    pretraining.step()
    pretraining.zero_grad()

tuned = SoftPrompt(lm.to(torch.bfloat16))
optimizer = torch.optim.AdamW([tuned.prompt], lr=0.1, weight_decay=0.0)
for step in range(80):
    ids = text(16, 3, length=5)
    loss = F.cross_entropy(tuned(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
