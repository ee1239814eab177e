"""Adam whose second moment takes one byte per weight."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import Optimizer


class CompactAdam(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-7, state_dtype=torch.float8_e4m3fn):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        self.state_dtype = state_dtype

    def pack(self, v):
        if self.state_dtype == torch.float32:
            return v, torch.ones(())
        scale = v.max().clamp(min=1e-30) / torch.finfo(self.state_dtype).max
        return (v / scale).to(self.state_dtype), scale

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"] = 0
                    s["m"] = torch.zeros_like(p)
                    s["v"], s["v_scale"] = self.pack(torch.zeros_like(p))
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                v = s["v"].to(p.dtype) * s["v_scale"]
                v = b2 * v + (1 - b2) * p.grad.square()
                s["v"], s["v_scale"] = self.pack(v)
                v = s["v"].to(p.dtype) * s["v_scale"] / (1 - b2 ** s["t"])
                p.sub_(group["lr"] / (1 - b1 ** s["t"]) * s["m"] / (v.sqrt() + group["eps"]))


class Tagger(nn.Module):
    def __init__(self, vocab=400, width=32, tags=6):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(width, tags)

    def forward(self, ids):
        x = self.words(ids)
        x = x + F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.out(x)


def main():
    torch.manual_seed(12)
    frequency = 1.0 / torch.arange(1, 401).float() ** 1.3
    tag_of = torch.randint(0, 6, (400,))
    model = Tagger()
    opt = CompactAdam(model.parameters(), lr=2e-3)
    for step in range(160):
        ids = torch.multinomial(frequency, 32 * 16, replacement=True).view(32, 16)
        loss = F.cross_entropy(model(ids).flatten(0, 1), tag_of[ids].flatten())
        model.zero_grad()
        loss.backward()
        opt.step()
        if step % 8 == 7:
            print("step", step + 1, "loss", round(loss.item(), 4))


main()
