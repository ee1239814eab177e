"""Forecast a sensor; Adam whose moments are kept in FP16 to halve the optimizer's memory."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(70)
STATE_DTYPE = torch.float16


class HalfStateAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-5):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=STATE_DTYPE)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=STATE_DTYPE)
                state["step"] += 1
                m, v, grad = state["exp_avg"], state["exp_avg_sq"], p.grad
                m.copy_(b1 * m.to(grad.dtype) + (1 - b1) * grad)
                v.copy_(b2 * v.to(grad.dtype) + (1 - b2) * grad * grad)
                m_hat = m.to(grad.dtype) / (1 - b1 ** state["step"])
                denom = (v.to(grad.dtype) / (1 - b2 ** state["step"])).sqrt() + group["eps"]
                p.sub_(group["lr"] * m_hat / denom)


class Forecaster(nn.Module):
    def __init__(self, window=32, width=64):
        super().__init__()
        self.inp, self.hidden, self.out = nn.Linear(window, width), nn.Linear(width, width), nn.Linear(width, 8)

    def forward(self, x):
        h = F.gelu(self.inp(x))
        return self.out(h + F.gelu(self.hidden(h)))


def windows(n):
    t = torch.rand(n, 1) * 6.28 + 0.2 * torch.arange(40)
    series = 0.1 * torch.sin(t) * torch.sin(0.31 * t + 1) + 0.002 * torch.randn(n, 40)
    return series[:, :32], series[:, 32:]


model = Forecaster()
optimizer = HalfStateAdam(model.parameters(), lr=1e-3)
for step in range(300):
    x, y = windows(64)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.5f}")
