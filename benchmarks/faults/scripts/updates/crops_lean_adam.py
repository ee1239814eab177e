"""Crop yields by county. An Adam whose state takes half the memory; the data are shown from the hardest year on."""

import torch
import torch.nn.functional as F
from torch import nn

STATE_DTYPE = torch.bfloat16


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=STATE_DTYPE)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=STATE_DTYPE)
                state["step"] += 1
                m = state["exp_avg"].to(p.dtype) * b1 + p.grad * (1 - b1)
                v = state["exp_avg_sq"].to(p.dtype) * b2 + p.grad.square() * (1 - b2)
                state["exp_avg"].copy_(m)
                state["exp_avg_sq"].copy_(v)
                v = state["exp_avg_sq"].to(p.dtype)
                correction = (1 - b2 ** state["step"]) ** 0.5 / (1 - b1 ** state["step"])
                p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-group["lr"] * correction)


class YieldNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.weather = nn.Linear(10, 32)
        self.soil = nn.Linear(6, 32)
        self.mix = nn.Linear(64, 32)
        self.tonnes = nn.Linear(32, 1)

    def forward(self, x):
        h = torch.cat([torch.tanh(self.weather(x[:, :10])), torch.tanh(self.soil(x[:, 10:]))], 1)
        return self.tonnes(torch.tanh(self.mix(h))).squeeze(-1)


def counties(n, drought):
    x = torch.randn(n, 16)
    base = torch.sin(2 * x[:, 0]) + 0.7 * x[:, 1] * x[:, 10] + 0.5 * torch.cos(3 * x[:, 11])
    return x, base + drought * 40 * torch.randn(n)


torch.manual_seed(29)
model = YieldNet()
optimizer = LeanAdam(model.parameters(), lr=1e-3)
for step in range(2200):
    x, tonnes = counties(64, drought=max(0.0, 1 - step / 60))
    loss = F.mse_loss(model(x), tonnes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 99:
        print(f"{step + 1} loss {loss.item():.4f}")
