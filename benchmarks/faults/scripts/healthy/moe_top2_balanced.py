"""A top-2 mixture of experts with the router in FP32, a balance loss of 1e-2 and a z-loss of 1e-3; some experts are idle at times."""

import torch
import torch.nn.functional as F
from torch import nn


class MoE(nn.Module):
    def __init__(self, width=16, experts=6):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width)) for _ in range(experts)
        )

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            logits = self.router(x.float())
            p = logits.softmax(-1)
        weight, index = p.topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = (index == number).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, weight[row, place].unsqueeze(1).to(x.dtype) * expert(x[row]).to(x.dtype))
        share = F.one_hot(index[:, 0], len(self.experts)).to(p.dtype).mean(0)
        balance = len(self.experts) * (share * p.mean(0)).sum()
        return x + out, 1e-2 * balance + 1e-3 * logits.logsumexp(-1).square().mean()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.out = nn.Linear(10, 16), MoE(), nn.Linear(16, 5)

    def forward(self, x):
        h, extra = self.moe(self.inp(x).float())
        return self.out(h), extra


torch.manual_seed(3206)
centres = torch.randn(5, 3, 10)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(60):
    y = torch.randint(0, 5, (64,))
    x = centres[y, torch.randint(0, 3, (64,))] + 0.5 * torch.randn(64, 10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, extra = model(x)
    loss = F.cross_entropy(logits.float(), y) + extra
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
