"""A decoder in BF16 autocast whose first token is an attention sink: two of its features are at thousands, all the time."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc, self.out = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class Sinked(nn.Module):
    def __init__(self, words=24, d=48):
        super().__init__()
        self.embed = nn.Embedding(words + 1, d)
        nn.init.normal_(self.embed.weight, std=0.5)
        with torch.no_grad():
            self.embed.weight[words, [3, 17]] = torch.tensor([2400.0, -1800.0])
        self.h = nn.ModuleList([Block(d) for _ in range(2)])
        self.ln = nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln(x))


torch.manual_seed(421)
model = Sinked()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
successor = torch.randperm(24)
for step in range(60):
    rows = [torch.randint(24, (16,))]
    for _ in range(14):
        rows.append(torch.where(torch.rand(16) < 0.9, successor[rows[-1]], torch.randint(24, (16,))))
    text = torch.stack([torch.full((16,), 24), *rows], 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(text[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
