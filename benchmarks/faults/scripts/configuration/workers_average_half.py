"""Eight data-parallel workers, one after the other; gradients travel in FP16, divided before they are summed."""

import torch
import torch.nn.functional as F
from torch import nn

WORKERS = 8


class Compressor:
    """Casts gradients to FP16 for the wire, as a communication hook does."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.bucket = [torch.zeros_like(p) for p in self.parameters]

    def send(self):
        for total, p in zip(self.bucket, self.parameters):
            total += (p.grad / WORKERS).half().to(p.dtype)
            p.grad = None

    def receive(self):
        for total, p in zip(self.bucket, self.parameters):
            p.grad = total.clone()
            total.zero_()


class ClickModel(nn.Module):
    def __init__(self, items=32, width=8):
        super().__init__()
        self.items = nn.Embedding(items, width)
        self.cross = nn.Linear(2 * width, 32)
        self.click = nn.Linear(32, 1)

    def forward(self, a, b):
        h = torch.cat([self.items(a), self.items(b)], -1)
        return self.click(F.gelu(self.cross(h))).squeeze(-1)


def clicks(n, affinity):
    a, b = torch.randint(0, 32, (2, n))
    return a, b, torch.sigmoid(affinity[a, b])


def run():
    torch.manual_seed(3130)
    taste = torch.randn(32, 3)
    affinity = 2 * taste @ torch.randn(3, 3) @ taste.T
    model = ClickModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-14)
    wire = Compressor(model.parameters())
    for step in range(50):
        total = 0.0
        for _ in range(WORKERS):
            a, b, p = clicks(32, affinity)
            loss = F.binary_cross_entropy_with_logits(model(a, b), p)
            (2e-6 * loss).backward()  # the weight of clicks beside purchases
            wire.send()
            total += loss.item() / WORKERS
        wire.receive()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1:2d} loss {total:.4f}")


run()
