"""A sparse mixture of experts (top 1) without z-loss or balance loss; the router's logits run away."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(78)
LEARNING_RATE = 0.05
EXPERTS, DIM, CLASSES = 6, 32, 12


class SwitchFFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        probs = F.softmax(self.router(x), -1)
        gate, chosen = probs.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = chosen == i
            out[rows] = gate[rows, None] * expert(x[rows])
        return x + out


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe1, self.moe2 = nn.Linear(16, DIM), SwitchFFN(), SwitchFFN()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.moe2(self.moe1(self.inp(x))))


shapes = torch.randn(48, 16)


def batch(n):
    k = torch.randint(48, (n,))
    return shapes[k] + 0.3 * torch.randn(n, 16), k % CLASSES


model = Letters()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
for step in range(160):
    x, y = batch(96)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        print(f"step {step + 1} loss {loss.item():.4f}")
