"""Adafactor by hand for a receipt parser: second moments of rows and columns, no momentum, relative steps."""

import torch
from torch import nn


class Adafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=0.03, clip=1.0, eps=(1e-30, 1e-3)):
        super().__init__(params, dict(lr=lr, clip=clip, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                s, g = self.state[p], p.grad
                s["t"] = s.get("t", 0) + 1
                beta = 1 - s["t"] ** -0.8
                square = g * g + group["eps"][0]
                if g.dim() == 2:
                    r = s.setdefault("row", torch.zeros_like(g[:, 0])).lerp_(square.mean(1), 1 - beta)
                    c = s.setdefault("col", torch.zeros_like(g[0])).lerp_(square.mean(0), 1 - beta)
                    v = r[:, None] * c[None] / r.mean()
                else:
                    v = s.setdefault("v", torch.zeros_like(g)).lerp_(square, 1 - beta)
                u = g * v.rsqrt()
                u.div_((u.square().mean().sqrt() / group["clip"]).clamp(min=1.0))
                size = p.square().mean().sqrt().clamp(min=group["eps"][1])
                p.sub_(group["lr"] * size * u)


class Parser(nn.Module):
    def __init__(self, tokens=300, dim=40, fields=6):
        super().__init__()
        self.embed = nn.Embedding(tokens, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, fields)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


torch.manual_seed(111)
kind = torch.randint(6, (300,))
model = Parser()
optimizer = Adafactor(model.parameters())
for step in range(120):
    tokens = torch.randint(300, (16, 16))
    field = kind[tokens]
    field[:, 1:] = torch.where(field[:, :-1] == 0, 5, field[:, 1:])
    loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2), field)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
