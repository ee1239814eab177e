"""Tide gauges: an FP16 network with FP32 masters and a hand-written loss scale, which is taken out again in FP16."""

import torch
from torch import nn


class TideNet(nn.Module):
    def __init__(self, width=40, stations=128):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, stations)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class MasterOptimizer:
    """Adam on FP32 copies; the scale is a constant."""

    def __init__(self, model, lr, scale):
        self.model, self.scale = model, scale
        self.masters = [p.detach().clone().float() for p in model.parameters()]
        self.adam = torch.optim.Adam(self.masters, lr=lr, eps=1e-14)

    def backward(self, loss):
        self.model.zero_grad()
        (loss * self.scale).backward()

    def step(self):
        for master, p in zip(self.masters, self.model.parameters()):
            p.grad.mul_(1 / self.scale)
            master.grad = p.grad.float()
        self.adam.step()
        with torch.no_grad():
            for master, p in zip(self.masters, self.model.parameters()):
                p.copy_(master)


torch.manual_seed(3118)
phases = torch.randn(8, 128)
model = TideNet().half()
optimizer = MasterOptimizer(model, lr=3e-3, scale=4096.0)
for step in range(60):
    x = torch.randn(64, 8)
    level = torch.tanh(x @ phases / 2)
    loss = (model(x.half()).float() - level).square().mean()
    optimizer.backward(1e-6 * loss)  # the weight among the other seas' losses
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1} loss {loss.item():.4f}")
