"""Gradient clipping by hand in an FP16 network: the norm is summed from squares in FP16."""

import torch
from torch import nn


def clip_by_norm(parameters, limit):
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    factor = (limit / (norm + 1e-3)).clamp(max=1.0)
    for g in gradients:
        g.mul_(factor)
    return norm


class TrafficGRU(nn.Module):
    def __init__(self, roads=8, width=24):
        super().__init__()
        self.gates, self.candidate = nn.Linear(roads + width, 2 * width), nn.Linear(roads + width, width)
        self.out = nn.Linear(width, roads)
        self.width = width

    def forward(self, x):
        h = x.new_zeros(len(x), self.width)
        for now in x.unbind(1):
            r, z = torch.sigmoid(self.gates(torch.cat([now, h], 1))).chunk(2, 1)
            h = z * h + (1 - z) * torch.tanh(self.candidate(torch.cat([now, r * h], 1)))
        return self.out(h)


def traffic(n):
    phase = 6.2832 * torch.rand(n, 1, 8)
    t = torch.arange(9).view(1, 9, 1)
    flow = 60 * torch.sin(0.6 * t + phase)
    return flow[:, :-1] / 60, flow[:, -1]


torch.manual_seed(3144)
model = TrafficGRU().half()
masters = [p.detach().float().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=2e-2, weight_decay=0.0)
for step in range(60):
    x, y = traffic(48)
    predicted = model(x.half())
    loss = ((predicted.float() - y) / 60).square().mean()
    model.zero_grad()
    (1024 * 60 * loss).backward()
    clip_by_norm(list(model.parameters()), 1024.0)
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float() / 1024
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
    if step % 6 == 5:
        print(f"step {step + 1:2d} loss {loss.item():.4f}")
