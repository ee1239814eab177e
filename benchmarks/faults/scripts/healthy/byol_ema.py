"""BYOL: an EMA teacher under no_grad, detached targets, two views; BF16 autocast with gradient accumulation."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Byol(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, dim))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def momentum_update(self, decay):
        for slow, fast in zip(self.target.parameters(), self.online.parameters()):
            slow.lerp_(fast, 1 - decay)

    def forward(self, a, b):
        pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
        with torch.no_grad():
            ta, tb = self.target(a), self.target(b)
        return (
            2
            - F.cosine_similarity(pa, tb.detach(), dim=-1).mean()
            - F.cosine_similarity(pb, ta.detach(), dim=-1).mean()
        )


def main():
    torch.manual_seed(0)
    model = Byol()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    data = torch.randn(256, 20)
    for update in range(12):
        for _ in range(3):
            x = data[torch.randint(256, (32,))]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x + 0.1 * torch.randn_like(x), x * (torch.rand_like(x) > 0.2)) / 3
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.momentum_update(0.99)
        if update % 4 == 0:
            print(update, loss.item() * 3)


if __name__ == "__main__":
    main()
