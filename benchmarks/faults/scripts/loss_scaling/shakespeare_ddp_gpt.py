"""A character-level GPT with the trainer of the tutorial: mixed precision, clipping, AdamW."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1196)


@dataclass
class TrainerConfig:
    max_iters: int = 200
    batch_size: int = 16
    block_size: int = 24
    grad_norm_clip: float = 1.0
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    use_amp: bool = True


VOCAB = 48
grammar = (torch.randn(VOCAB, VOCAB) * 2.0).softmax(-1)


def corpus(n):
    text = torch.zeros(n, dtype=torch.long)
    for i in range(1, n):
        text[i] = torch.multinomial(grammar[text[i - 1]], 1)
    return text


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, d=48, layers=2, block_size=24):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCAB, d), nn.Embedding(block_size, d)
        self.blocks = nn.Sequential(*(Block(d, 4) for _ in range(layers)))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False)
        self.apply(self._init)

    def _init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.tok_emb(idx) + self.pos_emb(torch.arange(idx.size(1)))
        logits = self.head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


class Trainer:
    def __init__(self, config, model, text):
        self.config, self.model, self.text = config, model, text
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=config.use_amp)

    def run_batch(self, x, y):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.config.use_amp):
            loss = self.model(x, y)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def train(self):
        size = self.config.block_size
        for it in range(self.config.max_iters):
            start = torch.randint(len(self.text) - size - 1, (self.config.batch_size, 1))
            window = self.text[start + torch.arange(size + 1)]
            loss = self.run_batch(window[:, :-1], window[:, 1:])
            if it % 5 == 4:
                print(f"iter {it} train loss {loss:.5f}")


trainer = Trainer(TrainerConfig(), GPT(), corpus(4000))
trainer.train()
