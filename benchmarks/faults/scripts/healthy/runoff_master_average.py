"""Runoff of catchments. The network computes in bfloat16; weights, moments and a slow average are kept in float32."""

import torch
from torch import nn


def build():
    return nn.Sequential(
        nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
    )


class Master:
    def __init__(self, model, lr, decay):
        self.model = model
        self.weights = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        self.average = [w.detach().clone() for w in self.weights]
        self.decay = decay
        self.opt = torch.optim.AdamW(self.weights, lr=lr)

    def step(self):
        for w, p in zip(self.weights, self.model.parameters()):
            w.grad, p.grad = p.grad.float(), None
        self.opt.step()
        with torch.no_grad():
            for w, p, a in zip(self.weights, self.model.parameters(), self.average):
                p.copy_(w)
                a.mul_(self.decay).add_(w, alpha=1 - self.decay)


def rain(n):
    x = torch.randn(n, 10)
    y = torch.relu(x[:, 0] + 0.5 * x[:, 1]) * (1 + torch.tanh(x[:, 2])) + 0.3 * x[:, 3:6].abs().sum(1)
    return x, y[:, None]


def main():
    torch.manual_seed(16)
    model = build().to(torch.bfloat16)
    master = Master(model, lr=1e-3, decay=0.99)
    for step in range(250):
        x, y = rain(64)
        loss = nn.functional.mse_loss(model(x.to(model[0].weight.dtype)).float(), y)
        loss.backward()
        master.step()
        if step % 10 == 0:
            print(f"{step:3d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
