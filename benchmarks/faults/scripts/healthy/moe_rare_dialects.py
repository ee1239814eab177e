"""Words of a language with dialects: a mixture of experts, top-1 routing, BF16 autocast. Two dialects are rare."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(49)
DIALECTS, D, EXPERTS = 6, 16, 6
share = torch.tensor([0.5, 0.3, 0.1, 0.08, 0.015, 0.005])
centre = 2 * torch.randn(DIALECTS, D)
rule = torch.randn(DIALECTS, D, 4) / 4


def words(n):
    dialect = torch.multinomial(share, n, replacement=True)
    sound = torch.randn(n, D)
    return centre[dialect] + sound, torch.einsum("nd,ndk->nk", sound, rule[dialect])


class Expert(nn.Sequential):
    def __init__(self, d):
        super().__init__(nn.Linear(d, 32), nn.GELU(), nn.Linear(32, d))


class MoE(nn.Module):
    def __init__(self, d=D):
        super().__init__()
        self.router = nn.Linear(d, EXPERTS)
        self.experts = nn.ModuleList(Expert(d) for _ in range(EXPERTS))
        self.out = nn.Linear(d, 4)

    def forward(self, x):
        probability, chosen = self.router(x).float().softmax(-1).max(-1)
        y = torch.zeros(len(x), D)
        for i, expert in enumerate(self.experts):
            picked = (chosen == i).nonzero()[:, 0]
            if len(picked):
                y = y.index_add(0, picked, expert(x[picked]).float() * probability[picked, None])
        return self.out(x + y)


model = MoE()
with torch.no_grad():  # routes by dialect from the start, as a tokenizer's language tag would
    model.router.weight.copy_(centre)
    model.router.bias.copy_(-0.5 * centre.square().sum(1))
model.router.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(360):
    x, y = words(48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = model(x)
    loss = F.mse_loss(prediction.float(), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
