"""Top-1 mixture of experts in BF16 autocast: most experts see few tokens, some none, and their gradients are zero then."""

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self, dim=24, experts=8):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) / (2 * dim) ** 0.5)

    def forward(self, x):
        weight, pick = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            mine = pick == e
            h = F.relu(x[mine] @ self.up[e]) @ self.down[e]
            out[mine] = (weight[mine, None] * h).to(out.dtype)
        return x + out


torch.manual_seed(61)
rule = torch.randn(6, 10, 10)
embed, moe, head = nn.Linear(16, 24), Experts(), nn.Linear(24, 10)
model = nn.Sequential(embed, moe, nn.LayerNorm(24), head)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(80):
    kind = torch.randint(6, (12,))
    v = torch.randn(12, 10)
    y = torch.einsum("bd,bde->be", v, rule[kind]) / 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(torch.cat([v, F.one_hot(kind, 6).float()], 1))
    loss = F.mse_loss(out.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
