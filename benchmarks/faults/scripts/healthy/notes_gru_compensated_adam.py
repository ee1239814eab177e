"""Melodies with a GRU in pure BF16. AdamW keeps what rounding took from each weight in a second BF16 tensor."""

import torch
from torch import nn


class CompensatedAdamW:
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.98), eps=1e-8):
        self.params, self.lr, self.betas, self.eps, self.t = list(params), lr, betas, eps, 0
        self.m = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        self.v = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        self.lost = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def step(self):
        self.t += 1
        b1, b2 = self.betas
        for p, m, v, lost in zip(self.params, self.m, self.v, self.lost):
            g = p.grad.float()
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            update = -self.lr * (m / (1 - b1**self.t)) / ((v / (1 - b2**self.t)).sqrt() + self.eps)
            wanted = (update + lost.float()).to(p.dtype)
            before = p.clone()
            p.add_(wanted)
            lost.copy_(wanted.float() - (p.float() - before.float()))

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Melody(nn.Module):
    def __init__(self, notes=40, dim=40):
        super().__init__()
        self.embed = nn.Embedding(notes, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, notes)

    def forward(self, x):
        return self.head(self.gru(self.embed(x))[0])


def melodies(n, length=24):
    step = torch.randint(1, 5, (n, 1))
    return (torch.randint(40, (n, 1)) + step * torch.arange(length)) % 40


torch.manual_seed(102)
net = Melody().bfloat16()
opt = CompensatedAdamW(net.parameters())
for i in range(160):
    x = melodies(16)
    loss = nn.functional.cross_entropy(net(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 5 == 0:
        print(f"iter {i} loss {loss.item():.4f}")
