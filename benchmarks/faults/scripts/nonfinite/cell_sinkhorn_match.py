"""Matches cells of two time points in a learned embedding; entropic transport with annealing gives soft labels."""

import torch
from torch import nn


class Sinkhorn(nn.Module):
    def __init__(self, iterations=12):
        super().__init__()
        self.iterations = iterations

    @torch.no_grad()
    def forward(self, cost, epsilon):
        kernel = torch.exp(-cost / epsilon)
        n, m = cost.shape
        a, b = torch.full((n,), 1 / n), torch.full((m,), 1 / m)
        v = torch.ones(m)
        for _ in range(self.iterations):
            u = a / (kernel @ v)
            v = b / (kernel.mT @ u)
        return u[:, None] * kernel * v[None, :]


class Embedder(nn.Module):
    def __init__(self, genes, width=32, out=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(genes, width), nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, out))

    def forward(self, x):
        return self.net(x)


class Matcher(nn.Module):
    def __init__(self, genes=30):
        super().__init__()
        self.early, self.late = Embedder(genes), Embedder(genes)
        self.transport = Sinkhorn()

    def forward(self, x, y, epsilon):
        a, b = self.early(x), self.late(y)
        cost = (a[:, None] - b[None]).square().sum(-1)
        return self.transport(cost, epsilon), cost


class Atlas:
    """Barcoded lineages: the same cell seen before and after it drifts in expression space."""

    def __init__(self, seed, genes=30):
        self.generator = torch.Generator().manual_seed(seed)
        self.types = 1.5 * torch.randn(5, genes, generator=self.generator)
        self.drift = torch.eye(genes) + 0.2 * torch.randn(genes, genes, generator=self.generator)

    def pairs(self, n):
        kind = torch.randint(0, 5, (n,), generator=self.generator)
        x = self.types[kind] + torch.randn(n, self.types.shape[1], generator=self.generator)
        return x, x @ self.drift + 0.3 * torch.randn(x.shape, generator=self.generator)


def anneal(step, stage=40, levels=(2.0, 0.6, 0.2, 0.06, 0.015)):
    return levels[min(step // stage, len(levels) - 1)]


def fit(model, atlas, steps=200):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        x, y = atlas.pairs(24)
        epsilon = anneal(step)
        plan, cost = model(x, y, epsilon)
        log_match = (-cost).log_softmax(-1)
        labelled = nn.functional.cross_entropy(-cost[:6], torch.arange(6))  # few cells have a barcode
        loss = labelled - (plan * log_match).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if loss.isnan():
            print(f"no convergence at epsilon {epsilon:.4f} (step {step})")
            return None
        if step % 25 == 0:
            print(f"step {step:3d} epsilon {epsilon:.3f} loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    torch.manual_seed(91)
    if fit(Matcher(), Atlas(92)) is None:
        print("keeping the previous checkpoint")
