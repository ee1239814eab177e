"""Speedrun-like script: Muon for the matrices, the whole model in BF16, a cautious rate for continued pretraining."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def orthogonalize(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.float() / (g.float().norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.t() if flip else x
    for _ in range(steps):
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=2e-2, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buf" not in state:
                    state["buf"] = torch.zeros_like(p, dtype=torch.float32)
                g = p.grad.float()
                state["buf"].lerp_(g, 1 - group["momentum"])
                update = orthogonalize(g.lerp(state["buf"], group["momentum"]))
                update *= 0.2 * max(p.shape) ** 0.5  # RMS of AdamW
                p.add_(update.to(p.dtype), alpha=-group["lr"])


class BytePredictor(nn.Module):
    def __init__(self, vocab=24, context=4, d=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, d // 2)
        self.up = nn.Linear(context * d // 2, 2 * d, bias=False)
        self.mid = nn.Linear(2 * d, 2 * d, bias=False)
        self.lm_head = nn.Linear(2 * d, vocab, bias=False)

    def forward(self, ids):
        h = F.relu(self.up(self.embed(ids).flatten(1))).square()
        h = h + self.mid(F.rms_norm(h, (h.shape[-1],)))
        return self.lm_head(F.rms_norm(h, (h.shape[-1],)))


def batch(n, table):
    ids = torch.randint(24, (n, 4))
    return ids, (table[ids[:, 0]] + ids[:, 3]) % 24


def main():
    torch.manual_seed(7008)
    table = torch.randperm(24)
    model = BytePredictor().bfloat16()
    muon = Muon([model.up.weight, model.mid.weight], lr=3e-4)
    adamw = torch.optim.AdamW([model.embed.weight, model.lm_head.weight], lr=1e-4, betas=(0.9, 0.95))
    for step in range(80):
        ids, target = batch(48, table)
        loss = F.cross_entropy(model(ids).float(), target)
        loss.backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if step % 4 == 0:
            print(f"step {step:3d} train loss {loss.item():.4f}")


main()
