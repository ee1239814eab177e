"""Digits on a small MLP with Shampoo written from the paper: Kronecker factors, renewed every few steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import Optimizer


def inverse_root(matrix, power):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.pow(-1.0 / power)) @ vectors.T


class Shampoo(Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.9, update_freq=6):
        super().__init__(params, dict(lr=lr, momentum=momentum, update_freq=update_freq))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["buf"] = torch.zeros_like(p)
                    state["factors"] = [torch.zeros(d, d) for d in p.shape]
                    state["roots"] = [torch.eye(d) for d in p.shape]
                state["step"] += 1
                update = p.grad
                if p.ndim == 2:
                    state["factors"][0] += p.grad @ p.grad.T
                    state["factors"][1] += p.grad.T @ p.grad
                    if state["step"] % group["update_freq"] == 0:
                        state["roots"] = [inverse_root(f, 4) for f in state["factors"]]
                    update = state["roots"][0] @ p.grad @ state["roots"][1]
                state["buf"].mul_(group["momentum"]).add_(update)
                p.add_(state["buf"], alpha=-group["lr"])


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.fc2 = nn.Linear(48, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def load(n, generator):
    prototypes = (torch.rand(10, 8, 8, generator=torch.Generator().manual_seed(0)) > 0.6).float()
    y = torch.randint(10, (n,), generator=generator)
    x = prototypes[y] + 0.2 * torch.randn(n, 8, 8, generator=generator)
    x[:, :, 0] = x[:, :, -1] = 0.0  # the margin is blank, as in the scans
    return x.clamp(0, 1), y


def main():
    torch.manual_seed(31)
    g = torch.Generator().manual_seed(5)
    model = Digits()
    optimizer = Shampoo(model.parameters(), lr=0.02)
    for step in range(20):
        x, y = load(32, g)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step:2d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
