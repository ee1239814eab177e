"""Lion on BF16 weights that are rounded stochastically, so that small steps count on average."""

import torch
import torch.nn.functional as F
from torch import nn


def add_stochastically(p, update):
    """Rounds p + update up or down by chance."""
    exact = p.to(torch.float32) + update
    near = exact.to(p.dtype)
    other = torch.where(near.to(exact.dtype) > exact, near * (1 - 2**-7), near * (1 + 2**-7))
    gap = (other.to(exact.dtype) - near.to(exact.dtype)).abs().clamp(min=1e-30)
    chance = ((exact - near.to(exact.dtype)).abs() / gap).clamp(0, 1)
    p.copy_(torch.where(torch.rand_like(chance) < chance, other, near))


class StochasticLion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.98)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p, dtype=torch.float32)
                g, m = p.grad.to(torch.float32), state["momentum"]
                add_stochastically(p, -group["lr"] * (b1 * m + (1 - b1) * g).sign())
                m.mul_(b2).add_(g, alpha=1 - b2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(10, 48), nn.Linear(48, 5)

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


torch.manual_seed(3201)
centres = torch.randn(5, 10)
model = Net().to(torch.bfloat16)
optimizer = StochasticLion(model.parameters(), lr=2e-3)
for step in range(80):
    y = torch.randint(0, 5, (64,))
    x = (centres[y] + 0.7 * torch.randn(64, 10)).to(torch.bfloat16)
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
