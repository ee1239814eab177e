"""A soft mixture of experts whose router's softmax is taken in FP16, with a sharp start."""

import torch
import torch.nn.functional as F
from torch import nn


class Router(nn.Module):
    def __init__(self, width, experts, sharpness=30.0):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        with torch.no_grad():
            self.gate.weight.mul_(sharpness)

    def forward(self, x):
        return F.softmax(self.gate(x).half(), -1)


class Expert(nn.Module):
    def __init__(self, width, outputs):
        super().__init__()
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, outputs)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, width=12, outputs=4, experts=6):
        super().__init__()
        self.router = Router(width, experts)
        self.experts = nn.ModuleList(Expert(width, outputs) for _ in range(experts))

    def forward(self, x):
        weights = self.router(x).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights.unsqueeze(-1) * outputs).sum(1)


def regions(n, planes, maps):
    x = torch.randn(n, 12)
    which = (x @ planes).argmax(-1)
    return x, torch.einsum("nd,ndo->no", x, maps[which]) / 3


def main(steps=60, batch=64):
    torch.manual_seed(3111)
    planes, maps = torch.randn(12, 6), torch.randn(6, 12, 4)
    model = Mixture()
    groups = [
        {"params": model.experts.parameters(), "lr": 3e-3},
        {"params": model.router.parameters(), "lr": 1e-1},
    ]
    optimizer = torch.optim.Adam(groups, eps=1e-15)
    for step in range(steps):
        x, y = regions(batch, planes, maps)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
