"""Poincare-ball embeddings of a taxonomy (a random tree), Riemannian SGD with burn-in."""

import torch
from torch import nn

torch.manual_seed(19)
NODES, DIM, NEG = 400, 5, 10
parent = [0] + [int(torch.randint(max(1, i // 3), (1,))) for i in range(1, NODES)]
edges = torch.tensor([(i, p) for i, p in enumerate(parent) if i])


class Ball(nn.Module):
    def __init__(self):
        super().__init__()
        self.points = nn.Embedding(NODES, DIM)
        nn.init.uniform_(self.points.weight, -1e-2, 1e-2)

    def distance(self, u, v):
        gap = (u - v).square().sum(-1)
        alpha = 1 - u.square().sum(-1)
        beta = 1 - v.square().sum(-1)
        return torch.acosh(1 + 2 * gap / (alpha * beta))

    def forward(self, child, candidates):
        u = self.points(child).unsqueeze(1)
        return self.distance(u, self.points(candidates))


class RSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                factor = (1 - p.square().sum(-1, keepdim=True)).square() / 4
                p.add_(factor * p.grad, alpha=-group["lr"])
                norm = p.norm(dim=-1, keepdim=True)
                p.div_((norm / (1 - 1e-5)).clamp(min=1.0))


def negatives(child, mom, known):
    """Uniform over the nodes that are not the parent."""
    neg = torch.randint(NODES, (len(child), NEG))
    clash = neg == mom.unsqueeze(1)
    return torch.where(clash, (neg + 1) % NODES, neg)


model = Ball()
opt = RSGD(model.parameters(), lr=0.03)
for it in range(120):
    if it == 20:
        opt.param_groups[0]["lr"] = 0.3
    child, mom = edges[torch.randint(len(edges), (4,))].T
    cand = torch.cat([mom.unsqueeze(1), negatives(child, mom, edges)], 1)
    loss = nn.functional.cross_entropy(-model(child, cand), torch.zeros(len(child), dtype=torch.long))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 10 == 0:
        print(f"burn-in {it < 20} it {it} loss {loss.item():.4f}")
