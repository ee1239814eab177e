"""A mixture of eight experts, one per token: most experts see few tokens, and some none in a step."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(80)
D, EXPERTS = 16, 8
maps = torch.randn(4, D, D) / D**0.5
centres = 2 * torch.randn(4, D)


def tokens(n):
    kind = torch.randint(4, (n,))
    x = centres[kind] + 0.5 * torch.randn(n, D)
    return x, torch.einsum("nij,nj->ni", maps[kind], x)


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, 32), nn.ReLU(), nn.Linear(32, D))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        weight, chosen = gates.max(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(1)
            if len(mine):
                y = y.index_add(0, mine, weight[mine, None] * expert(x[mine]))
        share = F.one_hot(chosen, EXPERTS).float().mean(0)
        return y, EXPERTS * (share * gates.mean(0)).sum()


moe = MoE()
opt = torch.optim.AdamW(moe.parameters(), lr=4e-3)
for step in range(150):
    x, y = tokens(64)
    out, balance = moe(x)
    loss = F.mse_loss(out, y)
    (loss + 0.01 * balance).backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f} balance {balance.item():.3f}")
