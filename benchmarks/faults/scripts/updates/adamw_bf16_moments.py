"""A memory-saving AdamW: weights in FP32, both moments in bfloat16."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim import Optimizer


class AdamWBF16States(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, state_dtype=torch.bfloat16):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.state_dtype = state_dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=self.state_dtype)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=self.state_dtype)
                state["step"] += 1
                grad = p.grad.to(self.state_dtype)
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                m = state["exp_avg"].float() / (1 - beta1 ** state["step"])
                v = state["exp_avg_sq"].float() / (1 - beta2 ** state["step"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m, v.sqrt().add_(group["eps"]), value=-group["lr"])


class Forecaster(nn.Sequential):
    def __init__(self, window=16, hidden=32):
        super().__init__(nn.Linear(window, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def series(n, window=16, level=0.0):
    t = torch.arange(window + 1.0)
    phase, freq = 6.28 * torch.rand(n, 1), 0.1 + 0.6 * torch.rand(n, 1)
    y = level + torch.sin(freq * t + phase)
    return y[:, :-1], y[:, -1:]


torch.manual_seed(2105)
model = Forecaster()
optimizer = AdamWBF16States(model.parameters(), lr=3e-4, betas=(0.9, 0.998))
for step in range(1000):
    # the first files still have their offset, the rest have been centred
    x, y = series(16, level=8.0 if step < 25 else 0.0)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.5f}")
