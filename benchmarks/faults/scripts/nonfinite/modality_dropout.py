"""Emotion from speech, face and text tokens; whole modalities are dropped in training, so that one may be missing later."""

from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    dim: int = 32
    heads: int = 4
    depth: int = 2
    classes: int = 5
    batch: int = 16
    steps: int = 30
    lr: float = 2e-3
    ema: float = 0.98
    drop_modality: float = 0.002


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.float()
        inv = x.square().mean(-1, keepdim=True).rsqrt()
        return x * inv * self.g


class Layer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n1, self.n2 = RMSNorm(cfg.dim), RMSNorm(cfg.dim)
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim, bias=False)
        self.proj = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.up = nn.Linear(cfg.dim, 4 * cfg.dim, bias=False)
        self.down = nn.Linear(2 * cfg.dim, cfg.dim, bias=False)
        self.heads = cfg.heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        a, gate = self.up(self.n2(x)).chunk(2, -1)
        return x + self.down(a * F.silu(gate))


class Fusion(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.proj = nn.ModuleDict({m: nn.Linear(w, cfg.dim, bias=False) for m, w in SIZES.items()})
        self.norms = nn.ModuleDict({m: RMSNorm(cfg.dim) for m in SIZES})
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.depth))
        self.head = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, inputs):
        tokens = []
        for name, x in inputs.items():
            if self.training:
                keep = torch.rand(len(x), 1, 1) > self.cfg.drop_modality
                x = x * keep
            tokens.append(self.norms[name](self.proj[name](x)))
        x = torch.cat(tokens, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


SIZES = {"speech": 20, "face": 12, "text": 24}
LENGTHS = {"speech": 6, "face": 3, "text": 4}


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = Fusion(cfg)
        self.shadow = deepcopy(self.model).requires_grad_(False)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=0.01)

    def batch(self):
        y = torch.randint(self.cfg.classes, (self.cfg.batch,))
        x = {m: torch.randn(self.cfg.batch, LENGTHS[m], w) + 0.5 * F.one_hot(y, w)[:, None] for m, w in SIZES.items()}
        return x, y

    def update_shadow(self):
        for s, p in zip(self.shadow.parameters(), self.model.parameters()):
            s.lerp_(p.detach(), 1 - self.cfg.ema)

    def fit(self):
        for step in range(self.cfg.steps):
            x, y = self.batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.opt.step()
            self.update_shadow()
            if step % 5 == 0:
                print(f"{step:3d} loss {loss.item():.4f}")


torch.manual_seed(17)
Trainer(Config()).fit()
