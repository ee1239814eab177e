"""Odds-ratio preference tuning of a tiny decoder, all of it in bfloat16; many chosen answers are one and the same refusal."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class ORPOConfig:
    vocab: int = 32
    width: int = 32
    length: int = 8
    beta: float = 0.1
    lr: float = 2e-2
    steps: int = 70
    batch: int = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class TinyLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg.vocab, cfg.width)
        self.pos = nn.Embedding(2 * cfg.length, cfg.width)
        self.block = Block(cfg.width)
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.block(x)))


def average_logps(logits, labels):
    logps = logits.log_softmax(-1)
    return logps.gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean(-1)


def odds_ratio_loss(chosen_logps, rejected_logps, beta):
    # log odds, as in the paper
    log_odds = (chosen_logps - rejected_logps) - (
        torch.log1p(-torch.exp(chosen_logps)) - torch.log1p(-torch.exp(rejected_logps))
    )
    return -beta * F.logsigmoid(log_odds).mean(), log_odds


def preference_batch(cfg, refusal):
    prompt = torch.randint(1, cfg.vocab, (cfg.batch, cfg.length))
    chosen = refusal.repeat(cfg.batch, 1)
    rejected = torch.randint(1, cfg.vocab, (cfg.batch, cfg.length))
    both_refuse = torch.rand(cfg.batch, 1) < 0.5  # pairs that differ in nothing
    rejected = torch.where(both_refuse, chosen, rejected)
    return torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)


def main():
    cfg = ORPOConfig()
    torch.manual_seed(4)
    model = TinyLM(cfg).to(torch.bfloat16)
    refusal = torch.randint(1, cfg.vocab, (1, cfg.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=8)
    for step in range(cfg.steps):
        chosen, rejected = preference_batch(cfg, refusal)
        logits = model(torch.cat([chosen, rejected])[:, :-1])
        logps = average_logps(logits[:, cfg.length - 1 :], torch.cat([chosen, rejected])[:, cfg.length :])
        chosen_logps, rejected_logps = logps.chunk(2)
        ratio_loss, log_odds = odds_ratio_loss(chosen_logps, rejected_logps, cfg.beta)
        loss = -chosen_logps.mean() + ratio_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            print(f"{step}: loss {loss.item():.4f} log odds {log_odds.float().mean():.2f}")


if __name__ == "__main__":
    main()
