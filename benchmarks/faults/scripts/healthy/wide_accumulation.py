"""64 micro-batches under BF16 autocast make one batch; gradients are FP32 and divided once."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).squeeze(1)


def train(batches=15, micro=24):
    torch.manual_seed(3223)
    w, model = torch.randn(8) / 2, Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch in range(batches):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro):
            x = torch.randn(4, 8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = model(x)
            part = (y.float() - torch.sin(x @ w)).square().sum()
            part.backward()
            total += part.item()
        for p in model.parameters():
            p.grad /= 4 * micro
        optimizer.step()
        print(f"batch {batch} loss {total / (4 * micro):.4f}")


train()
