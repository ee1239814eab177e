"""Supervised fine-tuning of a small decoder on support chats; only the answer's tokens are trained on."""

import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

IGNORE_INDEX = -100
PAD, BOS, EOS, ASSISTANT = 0, 1, 2, 3


@dataclass
class ChatConfig:
    vocab_size: int = 20
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    max_position: int = 48


@dataclass
class CausalLMOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.num_heads
        self.input_layernorm = RMSNorm(cfg.hidden_size)
        self.qkv_proj = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size, bias=False)
        self.o_proj = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size)
        self.gate_up = nn.Linear(cfg.hidden_size, 4 * cfg.hidden_size, bias=False)
        self.down = nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv_proj(self.input_layernorm(x)).view(b, t, 3, self.heads, c // self.heads).unbind(2)
        a = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.o_proj(a.transpose(1, 2).reshape(b, t, c))
        gate, up = self.gate_up(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class ChatForCausalLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size, padding_idx=PAD)
        self.embed_positions = nn.Embedding(cfg.max_position, cfg.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        h = self.embed_tokens(input_ids) + self.embed_positions(torch.arange(input_ids.size(1)))
        for layer in self.layers:
            h = layer(h)
        logits = self.lm_head(self.norm(h))
        loss = None
        if labels is not None:
            shift_logits = logits[:, :-1].float().reshape(-1, logits.size(-1))
            shift_labels = labels[:, 1:].reshape(-1)
            loss = F.cross_entropy(shift_logits, shift_labels, ignore_index=IGNORE_INDEX)
        return CausalLMOutput(loss=loss, logits=logits)


class ChatDataset(Dataset):
    """Questions of very different length; the first word decides on the answer."""

    def __init__(self, size, seed):
        rng = random.Random(seed)
        self.rows = []
        for _ in range(size):
            length = rng.randint(4, 16) if rng.random() < 0.8 else rng.randint(17, 30)
            question = [rng.randint(4, 19) for _ in range(length)]
            answer = [4 + (question[0] + 3 * j) % 16 for j in range(4)] + [EOS]
            self.rows.append(([BOS, *question, ASSISTANT], answer))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows, max_length=24):
    input_ids, labels = [], []
    for prompt, answer in rows:
        ids = (prompt + answer)[:max_length]
        lab = ([IGNORE_INDEX] * len(prompt) + answer)[:max_length]
        pad = max_length - len(ids)
        input_ids.append(ids + [PAD] * pad)
        labels.append(lab + [IGNORE_INDEX] * pad)
    return {"input_ids": torch.tensor(input_ids), "labels": torch.tensor(labels)}


def get_cosine_schedule_with_warmup(optimizer, warmup, total):
    def scale(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def main():
    torch.manual_seed(3407)
    model = ChatForCausalLM(ChatConfig())
    accumulation, total = 4, 40
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, betas=(0.9, 0.95), weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, total)
    loader = DataLoader(ChatDataset(2 * accumulation * total, seed=7), batch_size=2, shuffle=True, collate_fn=collate)
    running = 0.0
    for i, batch in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(**batch)
        (out.loss / accumulation).backward()
        running += out.loss.item() / accumulation
        if (i + 1) % accumulation == 0:
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (i + 1) // accumulation % 5 == 0:
                print({"loss": round(running, 4), "grad_norm": grad_norm.item(), "lr": scheduler.get_last_lr()[0]})
            running = 0.0


if __name__ == "__main__":
    main()
