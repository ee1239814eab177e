"""Saves memory: weights live on the E4M3 grid, one power-of-two scale per tensor, and the optimizer writes straight back."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def on_grid(w):
    scale = torch.exp2(torch.floor(torch.log2(448.0 / w.abs().max().clamp(min=1e-12))))
    return (w * scale).to(torch.float8_e4m3fn).to(w.dtype) / scale


class FP8Adam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - b1)
                state["v"].lerp_(p.grad.square(), 1 - b2)
                m = state["m"] / (1 - b1 ** state["step"])
                v = state["v"] / (1 - b2 ** state["step"])
                new = p - group["lr"] * m / (v.sqrt() + group["eps"])
                p.copy_(on_grid(new) if p.dim() > 1 else new)


class Churn(nn.Module):
    def __init__(self, fields=8, values=16, dim=6):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(values, dim) for _ in range(fields))
        self.hidden1, self.hidden2 = nn.Linear(fields * dim, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        h = torch.cat([table(x[:, i]) for i, table in enumerate(self.tables)], 1)
        return self.out(F.relu(self.hidden2(F.relu(self.hidden1(h))))).squeeze(-1)


def customers(n, effect):
    x = torch.randint(16, (n, 8))
    score = sum(effect[i, x[:, i]] for i in range(8)) + effect[0, x[:, 1]] * effect[2, x[:, 3]]
    return x, (score + 0.3 * torch.randn(n) > 0).float()


def main():
    torch.manual_seed(7007)
    effect = torch.randn(8, 16)
    model = Churn()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(on_grid(p))
    optimizer = FP8Adam(model.parameters(), lr=1e-3)
    for step in range(130):
        x, y = customers(128, effect)
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")


main()
