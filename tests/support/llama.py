"""A small Llama (RMSNorm, RoPE, SwiGLU, grouped-query attention) and its training, to be run as a script.

Arguments: ``--compile BACKEND``, ``--blocks`` (compile each block by itself, in place), ``--autocast``, ``--steps N``,
``--fused``, ``--checkpoint``, ``--functional``, and a planted fault: ``--fault eps | order | scale``.
It prints a digest of losses and weights.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--compile")
parser.add_argument("--blocks", action="store_true")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--fused", action="store_true")
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--functional", action="store_true")
parser.add_argument("--fault", default="")
parser.add_argument("--eps", type=float, default=1e-2)
asked = parser.parse_args()

VOCABULARY, WIDTH, HEADS, KV_HEADS, HIDDEN, BLOCKS, LENGTH = 64, 32, 4, 2, 64, 3, 16


class RMSNorm(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))  # the line of eps


def rotate(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, fault):
        super().__init__()
        size = WIDTH // HEADS
        self.fault, self.size = fault, size
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * size, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x):
        q, k, v = (w(x).view(len(x), LENGTH, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        if self.fault == "scale":
            scores = (q * self.size**-0.5) @ k.transpose(-1, -2)  # the line of scale, before
        else:
            scores = (q @ k.transpose(-1, -2)) * self.size**-0.5  # the line of scale, after
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        weights = torch.softmax((scores + mask).float(), -1).to(v.dtype)
        return self.wo((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        fault = asked.fault if index == 1 else ""
        self.fault = fault
        self.attention_norm = RMSNorm()
        self.attention = Attention(fault)
        self.ffn_norm = RMSNorm(asked.eps if fault == "eps" else 1e-5)
        self.feed_forward = FeedForward()
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x):
        a = self.attention(self.attention_norm(x))
        h = x + (a + self.bias) if self.fault == "order" else (x + a) + self.bias  # the line of order
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(i) for i in range(BLOCKS))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if asked.checkpoint else block(x)
        return self.head(self.norm(x))


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=asked.fused)
    if asked.blocks:
        for block in model.blocks:
            block.compile(backend=asked.compile)
    call = torch.compile(model, backend=asked.compile) if asked.compile and not asked.blocks else model
    if asked.functional:
        call = functional(model)
    digest = hashlib.sha256()
    for step in range(asked.steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
        autocast = torch.autocast("cpu", torch.bfloat16) if asked.autocast else contextlib.nullcontext()
        with autocast:
            logits = call(tokens[:, :-1])  # the line of the call
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        digest.update(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    print("DIGEST", digest.hexdigest())


def functional(model):
    """The first and the last layer alone, as functions of the weights: no module is called."""

    def call(tokens):
        x = F.embedding(tokens, model.embed.weight)
        return F.linear(F.silu(x), model.head.weight)

    return call


main()
