"""Spread of seagrass over a grid of plots: message passing with squared ReLUs and a few active features per plot."""

import torch
import torch.nn.functional as F
from torch import nn


class Spread(nn.Module):
    def __init__(self, dim, keep=8):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.near, self.own = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)
        self.keep = keep

    def forward(self, h, links):
        x = self.norm(h)
        a = F.relu(self.own(x) + links @ self.near(x)).square()
        least = a.topk(self.keep, dim=-1).values[..., -1:]
        return h + self.down(a * (a >= least))


class SeagrassNet(nn.Module):
    def __init__(self, features=9, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(features, dim)
        self.layers = nn.ModuleList(Spread(dim) for _ in range(depth))
        self.cover = nn.Linear(dim, 1)

    def forward(self, x, links):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h, links)
        return self.cover(h).squeeze(-1)


def grid_links(side=8):
    at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).view(-1, 2)
    near = ((at[:, None] - at).abs().sum(-1) == 1).float()
    return near / near.sum(1, keepdim=True)


def survey(n, g, links):
    x = torch.randn(n, 64, 9, generator=g)
    seed = torch.sigmoid(2 * x[..., 0] - x[..., 1].abs())
    cover = seed + 0.8 * (links @ (seed * x[..., 2].tanh())[..., None]).squeeze(-1)
    return x, cover + 0.05 * torch.randn(n, 64, generator=g)


if __name__ == "__main__":
    torch.manual_seed(231)
    g = torch.Generator().manual_seed(232)
    links = grid_links()
    net = SeagrassNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200, eta_min=1e-4)
    for step in range(200):
        x, cover = survey(16, g, links)
        loss = F.mse_loss(net(x, links), cover)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.5f}")
