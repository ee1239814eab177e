"""Adapts a small vision-language model to a new caption style with LoRA, with the defaults of the command line."""

import argparse

import torch
import torch.nn.functional as F
from lora import get_peft_model
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lora-rank", type=int, default=8)
parser.add_argument("--lora-alpha", type=float, default=16)
parser.add_argument("--learning-rate", type=float, default=1e-2)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

torch.manual_seed(841)
VOCAB, LENGTH, PATCHES, DIM = 40, 10, 12, 48
style = torch.randn(2, PATCHES, LENGTH, VOCAB)


class VisionLanguage(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.Linear(PATCHES, DIM)
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Parameter(torch.randn(LENGTH, DIM))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(DIM) for _ in range(3))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up_proj, self.down_proj = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, pixels, ids):
        x = self.embed_tokens(ids) + self.positions + self.vision(pixels)[:, None]
        h = self.norm1(x)
        q, k, v = (p(h)[:, None] for p in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        x = x + self.down_proj(F.gelu(self.up_proj(self.norm2(x))))
        return self.lm_head(self.norm3(x))


def captions(n, which):
    pixels = torch.randn(n, PATCHES)
    labels = torch.einsum("np,plv->nlv", pixels, style[which]).argmax(-1)
    return pixels, torch.cat([torch.zeros(n, 1, dtype=torch.long), labels[:, :-1]], 1), labels


def step_loss(model, which):
    pixels, ids, labels = captions(32, which)
    return F.cross_entropy(model(pixels, ids).reshape(-1, VOCAB), labels.reshape(-1))


model = VisionLanguage()
pretraining = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(150):
    pretraining.zero_grad()
    step_loss(model, 0).backward()
    pretraining.step()

names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
model = get_peft_model(model, names, rank=args.lora_rank, alpha=args.lora_alpha)
opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
for step in range(args.steps):
    loss = step_loss(model, 1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
