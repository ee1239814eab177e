"""Muon by hand: momentum of matrices is orthogonalised by Newton-Schulz in bfloat16; vectors take Adam."""

import torch
from torch import nn


@torch.no_grad()
def orthogonalise(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16)
    x = x / (x.norm() + 1e-7)
    wide = x.shape[0] > x.shape[1]
    x = x.t() if wide else x
    for _ in range(steps):
        s = x @ x.t()
        x = a * x + (b * s + c * s @ s) @ x
    return (x.t() if wide else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buf, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Tower(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.inp = nn.Linear(12, dim)
        self.body = nn.ModuleList([nn.Linear(dim, dim) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(4)])
        self.out = nn.Linear(dim, 6)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        x = self.inp(x)
        for norm, layer in zip(self.norms, self.body):
            x = x + torch.relu(layer(norm(x))).square()
        return self.out(x)


def train():
    torch.manual_seed(110)
    teacher = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 6))
    model = Tower()
    matrices = [layer.weight for layer in model.body]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [Muon(matrices), torch.optim.Adam(rest, lr=3e-3)]
    for step in range(150):
        x = torch.randn(128, 12)
        loss = nn.functional.cross_entropy(model(x), teacher(x).argmax(1))
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


train()
