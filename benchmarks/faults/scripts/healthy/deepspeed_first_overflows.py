"""FP16 with initial_scale_power 32, DeepSpeed's old default: a dozen OVERFLOW lines first, and then it trains."""

import logging

import torch
import torch.nn as nn
import torch.nn.functional as F

logging.basicConfig(format="[%(levelname)s] %(message)s", level=logging.INFO)
logger = logging.getLogger("engine")


class T5Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.ln1, self.ln2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.heads = heads
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.wi, self.wo = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.wo(F.relu(self.wi(self.ln2(x))))


class T5Encoder(nn.Module):
    def __init__(self, vocab=40, d=32, layers=2, length=18):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.relative = nn.Embedding(2 * length, 4)
        self.block = nn.ModuleList(T5Block(d) for _ in range(layers))
        self.final, self.lm_head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        t = torch.arange(ids.shape[1])
        bias = self.relative(t[:, None] - t + len(t)).permute(2, 0, 1)
        x = self.shared(ids)
        for block in self.block:
            x = block(x, bias)
        return self.lm_head(self.final(x))


def spans(n, length=18):
    """Counting by twos or threes; every fifth word is a sentinel to be filled in."""
    ids = (torch.randint(39, (n, 1)) + torch.randint(2, 4, (n, 1)) * torch.arange(length)) % 39
    hole = torch.rand(n, length) < 0.2
    return ids.masked_fill(hole, 39), ids, hole


torch.manual_seed(621)
model = T5Encoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=1000)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 15)
for step in range(180):
    ids, labels, hole = spans(24)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float()[hole], labels[hole])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if scaler.get_scale() < scale:
        logger.info("OVERFLOW! Skipping step. Attempted loss scale: %s, reducing to %s", scale, scaler.get_scale())
    else:
        warmup.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
