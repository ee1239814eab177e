"""Hard gates with a custom backward: the forward pass is a step function, the backward pass a triangle."""

import torch
import torch.nn.functional as F
from torch import nn


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 - x.abs()).clamp(min=0)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value, self.out = nn.Linear(10, 64), nn.Linear(10, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.out(Step.apply(self.gate(x)) * self.value(x))


torch.manual_seed(3229)
model, centres = Gated(), torch.randn(4, 3, 10)
optimizer = torch.optim.NAdam(model.parameters(), lr=4e-3)
for step in range(60):
    y = torch.randint(0, 4, (64,))
    x = centres[y, torch.randint(0, 3, (64,))] + 0.5 * torch.randn(64, 10)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
