"""A mixture of experts as in ST-MoE: BF16 experts, router in FP32 with z-loss and balance loss, noisy start."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(611)
EXPERTS, DIM = 4, 32


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 32), nn.SiLU(), nn.Linear(32, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            logits = self.gate(x.to(self.gate.weight.dtype))
            probs = logits.softmax(-1)
        weight, chosen = probs.topk(2, -1)
        y = torch.zeros_like(probs[:, :1]) * x
        for e, expert in enumerate(self.experts):
            rows, slot = (chosen == e).nonzero(as_tuple=True)
            y = y.index_add(0, rows, (expert(x[rows]) * weight[rows, slot, None]).to(y.dtype))
        load = F.one_hot(chosen[:, 0], EXPERTS).to(probs.dtype).mean(0)
        aux = EXPERTS * (load * probs.mean(0)).sum() * 1e-2 + 1e-3 * logits.logsumexp(-1).square().mean()
        return x + y, aux


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe, self.head = nn.Linear(20, DIM), MoE(), nn.Linear(DIM, 9)

    def forward(self, x):
        h, aux = self.moe(F.gelu(self.inp(x)))
        return self.head(h), aux


net, centres = Net(), torch.randn(36, 20)
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3)
for step in range(150):
    k = torch.randint(36, (64,))
    x = centres[k] + 0.5 * torch.randn(64, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, aux = net(x)
    loss = F.cross_entropy(logits.float(), k % 9)
    optimizer.zero_grad()
    (loss + aux).backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f} aux {aux.item():.4f}")
