"""A mixture of experts in BF16 autocast: experts beyond the top two are -inf, some get no token, their share's log is clamped."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class TopTwoMoE(nn.Module):
    def __init__(self, width=16, experts=6):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(experts)
        )
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x):
        logits = self.router(x).float()
        kept = logits.topk(2, -1).indices
        masked = torch.full_like(logits, float("-inf")).scatter(-1, kept, logits.gather(-1, kept))
        gates = masked.softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (gates[:, i] > 0).nonzero().squeeze(-1)  # may be none
            out = out.index_add(0, rows, (gates[rows, i : i + 1] * expert(x[rows])).to(out.dtype))
        share = (gates > 0).float().mean(0)
        self.load.copy_(share)
        importance = logits.softmax(-1).mean(0)
        balance = (importance * share).sum() * len(self.experts)
        entropy = -(importance * torch.log(importance.clamp(min=1e-9))).sum()
        return x + out, balance - 0.1 * entropy


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.inp = nn.Linear(8, width)
        self.moe = TopTwoMoE(width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        h, auxiliary = self.moe(self.inp(x))
        return self.out(self.norm(h)), auxiliary


@torch.no_grad()
def load_divergence(load):
    share = load / load.sum()
    uniform = torch.full_like(share, 1 / len(share))
    forward = (share * (share / uniform).log()).sum()  # NaN as soon as an expert is unused: 0 log 0
    reverse = (uniform * (uniform / share).log()).sum()  # infinite then
    return forward.item(), reverse.item()


def main():
    torch.manual_seed(108)
    centres = 3 * torch.randn(12, 8)
    model = Model()
    model.moe.router.weight.data[0].mul_(6)  # a router that was warmed up on other data
    model.moe.router.weight.data[4:].mul_(0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(24):
        k = torch.randint(12, (24,)) if step % 4 else torch.randint(2, (24,))
        x, y = centres[k] + 0.3 * torch.randn(24, 8), k % 4
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, auxiliary = model(x)
        loss = F.cross_entropy(logits.float(), y) + 0.01 * auxiliary
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f} load {load_divergence(model.moe.load)}")


if __name__ == "__main__":
    main()
