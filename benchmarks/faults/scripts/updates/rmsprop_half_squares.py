"""Vessel speeds from sensor features; an RMSprop by hand keeps its running squares in FP16."""

import torch
from torch import nn


class FrugalRMSprop(torch.optim.Optimizer):
    """Running squares in half precision: a quarter of Adam's memory."""

    def __init__(self, params, lr=1e-3, alpha=0.9, eps=1e-6):
        super().__init__(params, {"lr": lr, "alpha": alpha, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "square_avg" not in state:
                    state["square_avg"] = torch.zeros_like(p).half()
                square = state["square_avg"]
                square.mul_(group["alpha"]).add_(p.grad.square().to(square.dtype), alpha=1 - group["alpha"])
                p.addcdiv_(p.grad, square.to(p.dtype).sqrt() + group["eps"], value=-group["lr"])


class SpeedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))

    def forward(self, x):
        return self.layers(x)


class Experiment:
    def __init__(self):
        torch.manual_seed(3126)
        self.truth = torch.randn(10, 4) / 3
        self.net = SpeedNet()
        self.optimizer = FrugalRMSprop(self.net.parameters(), lr=5e-3)

    def epoch(self, number, batches=10):
        for _ in range(batches):
            x = torch.randn(64, 10)
            loss = (self.net(x) - torch.sin(x @ self.truth)).square().mean()
            self.optimizer.zero_grad()
            (5e-4 * loss).backward()  # the weight of this task
            self.optimizer.step()
        print(f"epoch {number} loss {loss.item():.4f}")


experiment = Experiment()
for number in range(8):
    experiment.epoch(number)
