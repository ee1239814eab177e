"""BF16 weights without masters, but every update is rounded stochastically."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def round_randomly(x):
    bits = x.view(torch.int32) + torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return (bits & -65536).view(torch.float32)


class DitheredSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros(p.shape, dtype=torch.float32))
                buf.mul_(group["momentum"]).add_(p.grad.float())
                wide = p.to(torch.float32) - group["lr"] * buf.to(torch.float32)
                p.copy_(round_randomly(wide.contiguous()) if wide.dtype == torch.float32 else wide)


torch.manual_seed(35)
true = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(False)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).bfloat16()
optimizer = DitheredSGD(model.parameters(), lr=2e-3)
for step in range(250):
    x = torch.randn(64, 20)
    moisture = 3 * true(x)
    loss = F.mse_loss(model(x.bfloat16()).float(), moisture)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.5f}")
