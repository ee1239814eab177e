"""Adafactor's rows and columns in FP32 for FP32 weights, with clipped updates and steps relative to the weights."""

import torch
from torch import nn


class RowColumn(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, square = self.state[p], p.grad.square() + 1e-30
                state["step"] = t = state.get("step", 0) + 1
                decay = 1 - t**-0.8
                if p.dim() == 2:
                    row = state.get("row", torch.zeros_like(p[:, 0]))
                    column = state.get("column", torch.zeros_like(p[0]))
                    state["row"] = row = decay * row + (1 - decay) * square.mean(1)
                    state["column"] = column = decay * column + (1 - decay) * square.mean(0)
                    update = p.grad / (row[:, None] * column / row.mean()).sqrt()
                else:
                    v = state.get("v", torch.zeros_like(p))
                    state["v"] = v = decay * v + (1 - decay) * square
                    update = p.grad / v.sqrt()
                update /= update.square().mean().sqrt().clamp(min=1.0)
                p.sub_(group["lr"] * p.square().mean().sqrt().clamp(min=1e-3) * update)


torch.manual_seed(3233)
w = torch.randn(7, 3) / 2
model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
optimizer = RowColumn(model.parameters(), lr=4e-2)
for step in range(80):
    x = torch.randn(64, 7)
    loss = (model(x) - torch.sin(x @ w)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
