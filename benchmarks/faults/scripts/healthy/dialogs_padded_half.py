"""Dialogue acts from padded turns in FP16 under a gradient scaler; the mask is -1e4, and the rate warms up from zero."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, ACTS, LENGTH = 90, 7, 20


class MaskedSelfAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x, keep):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        scores = scores + (1.0 - keep[:, None, None].to(scores.dtype)) * -1e4
        y = scores.softmax(-1).to(v.dtype) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class ActTagger(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.words = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.attention, self.norm = MaskedSelfAttention(dim), nn.LayerNorm(dim)
        self.fc, self.act = nn.Linear(dim, dim), nn.Linear(dim, ACTS)

    def forward(self, ids):
        keep = ids != 0
        x = self.words(ids)
        x = self.norm(x + self.attention(x, keep))
        x = F.gelu(self.fc(x)) * keep[..., None]
        return self.act(x.sum(1) / keep.sum(1, keepdim=True))


def turns(n, taste):
    label = torch.randint(ACTS, (n,))
    ids = 1 + torch.multinomial(taste[label], LENGTH, replacement=True)
    length = torch.randint(2, LENGTH + 1, (n, 1))
    return ids.masked_fill(torch.arange(LENGTH) >= length, 0), label


torch.manual_seed(373)
taste = torch.distributions.Dirichlet(torch.full((ACTS, VOCAB - 1), 0.15)).sample()
model = ActTagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 20, 1.0))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=60)
for step in range(120):
    ids, label = turns(32, taste)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float(), label)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
