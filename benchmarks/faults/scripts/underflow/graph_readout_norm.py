"""Molecule-like graphs: message passing with an RMS norm before each layer; node features are partial charges."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(14)
NODES, FEATS = 10, 8


def graphs(n):
    adjacency = (torch.rand(n, NODES, NODES) < 0.25).float()
    adjacency = ((adjacency + adjacency.transpose(1, 2)) > 0).float()
    adjacency = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
    charge = 1e-3 * torch.randn(n, NODES, FEATS)
    smooth = adjacency @ charge
    target = (charge[..., 0] * smooth[..., 1]).sum(1) * 1e6
    return adjacency, charge, (target > 0).long()


class RMSNorm(nn.Module):
    def __init__(self, d, eps=0.1):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class MessageLayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.norm = RMSNorm(i)
        self.own, self.other = nn.Linear(i, o, bias=False), nn.Linear(i, o, bias=False)

    def forward(self, adjacency, x):
        x = self.norm(x)
        return F.silu(self.own(x) + self.other(adjacency @ x))


class GNN(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.layers = nn.ModuleList([MessageLayer(FEATS, d), MessageLayer(d, d)])
        self.head = nn.Linear(d, 2)

    def forward(self, adjacency, x):
        for layer in self.layers:
            x = layer(adjacency, x)
        return self.head(x.sum(1))


gnn = GNN()
opt = torch.optim.AdamW(gnn.parameters(), lr=3e-3)
data = graphs(1024)
for epoch in range(25):
    total = 0.0
    for idx in torch.randperm(1024).split(128):
        a, x, y = (d[idx] for d in data)
        loss = F.cross_entropy(gnn(a, x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() / 8
    print(f"epoch {epoch} loss {total:.4f}")
