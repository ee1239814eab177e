"""Insurance claims by priority, model.half() with a hand-written T5LayerNorm. The claim amounts come in as they are."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DTYPE = torch.float16


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class ClaimNet(nn.Module):
    def __init__(self, fields=10, dim=64, classes=4):
        super().__init__()
        self.embed = nn.Linear(fields, dim)
        self.norm1, self.ff1 = RMSNorm(dim), nn.Linear(dim, dim)
        self.norm2, self.ff2 = RMSNorm(dim), nn.Linear(dim, dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.ff1(F.relu(self.norm1(h)))
        h = self.ff2(F.relu(self.norm2(h)))
        return self.head(h)


def claims(n):
    x = torch.randn(n, 10)
    amount = torch.exp(5.5 + 1.2 * torch.randn(n))  # a few hundred, some of them thousands
    y = 2 * (x[:, 1] + x[:, 2] > 0).long() + (x[:, 3] * x[:, 4] > 0).long()
    x[:, 1:5] *= amount[:, None]
    return x, y


torch.manual_seed(86)
model = ClaimNet().to(DTYPE)
masters = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=2e-3)
for step in range(200):
    x, y = claims(128)
    loss = F.cross_entropy(model(x.to(DTYPE)).float(), y)
    (64 * loss).backward()
    for m, p in zip(masters, model.parameters()):
        m.grad = p.grad.to(m.dtype) / 64
        p.grad = None
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(masters, model.parameters()):
            p.copy_(m)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
