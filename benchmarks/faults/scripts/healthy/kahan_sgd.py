"""SGD with momentum on BF16 weights; what rounding takes is kept in a second BF16 tensor and added next time."""

import torch
from torch import nn


class KahanSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["buffer"] = torch.zeros_like(p, dtype=torch.float32)
                    state["lost"] = torch.zeros_like(p)
                buffer = state["buffer"].mul_(group["momentum"]).add_(p.grad)
                correction = state["lost"] - group["lr"] * buffer.to(p.dtype)
                moved = p + correction
                state["lost"] = correction - (moved - p)
                p.copy_(moved)


def build():
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))


def main():
    torch.manual_seed(3202)
    w = torch.randn(6, 2) / 2
    model = build().bfloat16()
    optimizer = KahanSGD(model.parameters(), lr=0.02)
    for step in range(120):
        x = torch.randn(64, 6)
        loss = (model(x.bfloat16()).float() - torch.sin(x @ w)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
