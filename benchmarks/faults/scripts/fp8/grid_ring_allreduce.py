"""Data parallelism in one process: four replicas, and gradients that travel as one byte each."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoadNet(nn.Module):
    def __init__(self, inputs=30, width=64):
        super().__init__()
        self.inp = nn.Linear(inputs, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return self.out(x + torch.tanh(self.mid(x))).squeeze(1)


def ring_all_reduce(tensors, wire=torch.float8_e5m2):
    total = tensors[0].to(wire)
    for t in tensors[1:]:
        total = (total.float() + t).to(wire)
    return total.float() / len(tensors)


def main(world=4, steps=120):
    torch.manual_seed(51)
    teacher = nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(False)
    replicas = [LoadNet()]
    replicas += [copy.deepcopy(replicas[0]) for _ in range(world - 1)]
    optimizers = [torch.optim.Adam(r.parameters(), lr=1e-3, eps=1e-12) for r in replicas]
    for step in range(steps):
        losses = []
        for r in replicas:
            x = torch.randn(32, 30)
            watts = F.mse_loss(r(x), 3 * teacher(x).squeeze(1))
            r.zero_grad()
            (watts * 1e-4).backward()
            losses.append(watts.item())
        for shards in zip(*(r.parameters() for r in replicas)):
            mean = ring_all_reduce([p.grad for p in shards])
            for p in shards:
                p.grad.copy_(mean)
        for o in optimizers:
            o.step()
        if step % 6 == 0:
            print(f"step {step} loss {sum(losses) / world:.4f}")


main()
