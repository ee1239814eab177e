"""Semantic hashing in FP16 autocast. A home-made loss scale doubles every few steps; nobody looks whether it fits."""

import torch
from torch import nn

torch.manual_seed(6)


class Hasher(nn.Module):
    def __init__(self, d_in=40, bits=16):
        super().__init__()
        self.fc1 = nn.Linear(d_in, 96)
        self.fc2 = nn.Linear(96, 96)
        self.code = nn.Linear(96, bits)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        h = torch.relu(self.fc2(h))
        return torch.tanh(self.code(h))


centres = torch.randn(7, 40)


def pairs(n=64):
    a, b = torch.randint(7, (n,)), torch.randint(7, (n,))
    xa = centres[a] + 0.3 * torch.randn(n, 40)
    xb = centres[b] + 0.3 * torch.randn(n, 40)
    return xa, xb, (a == b).float() * 2 - 1


model = Hasher()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_scale, grow_every = 2.0**14, 3

for step in range(36):
    xa, xb, same = pairs()
    with torch.autocast("cpu", dtype=torch.float16):
        ha, hb = model(xa), model(xb)
    similarity = (ha.float() * hb.float()).mean(-1)
    loss = ((similarity - same) ** 2).mean()
    (loss * loss_scale).backward()
    for p in model.parameters():
        p.grad.div_(loss_scale)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % grow_every == 0:
        loss_scale *= 2.0
    if step % 6 == 0:
        print(f"step {step}: loss {loss.item():.4f} scale {loss_scale:.0f}")
