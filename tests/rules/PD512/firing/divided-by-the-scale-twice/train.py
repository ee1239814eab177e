"""A plot of gradient norms divides the gradients of one branch by the loss scale, in place, after `unscale_`."""

import torch
from torch import nn

torch.manual_seed(0)


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.right = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.left(x[:, :8]), self.right(x[:, 8:])], 1))


model = TwoBranches()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(60):
    x = torch.randn(32, 16)
    target = (x[:, :1] * x[:, 8:9]).tanh()
    loss = (model(x) - target).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if step >= 30:
        norms = [p.grad.div_(scaler.get_scale()).norm() for p in model.right.parameters()]
    scaler.step(optimizer)
    scaler.update()
