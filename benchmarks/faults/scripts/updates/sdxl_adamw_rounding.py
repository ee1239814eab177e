"""Finetuning in bfloat16 with an AdamW that rounds its updates stochastically."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(996)
TRAIN, TEST, FEATURES, DIM = 96, 512, 24, 96
direction = torch.randn(FEATURES, 3) / FEATURES**0.5


def samples(n):
    x = torch.randn(n, FEATURES)
    return x, torch.tanh(x @ direction) + 0.6 * torch.randn(n, 3)


def copy_stochastic_(target, source):
    """Adds random bits below the mantissa of bfloat16, then cuts them off."""
    result = torch.randint_like(source, 0, 1 << 16, dtype=torch.int32)
    result.add_(source.view(torch.int32))
    result.bitwise_and_(-65536)
    target.copy_(result.view(torch.float32))


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=1e-2):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                grad = p.grad.float()
                # weight decay
                p.mul_(1 - group["lr"] * group["weight_decay"])
                wide = p.float()
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denom = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                wide.addcdiv_(state["exp_avg"], denom, value=-group["lr"] / (1 - beta1 ** state["step"]))
                copy_stochastic_(p, wide)


net = nn.Sequential(nn.Linear(FEATURES, DIM), nn.SiLU(), nn.Linear(DIM, DIM), nn.SiLU(), nn.Linear(DIM, 3))
net = net.to(torch.bfloat16)
opt = AdamW(net.parameters(), lr=2e-3, weight_decay=0.8)
x, y = samples(TRAIN)
x_test, y_test = samples(TEST)
for epoch in range(120):
    for pick in torch.randperm(TRAIN).split(24):
        loss = F.mse_loss(net(x[pick].bfloat16()).float(), y[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch % 5 == 4:
        with torch.no_grad():
            held_out = F.mse_loss(net(x_test.bfloat16()).float(), y_test)
        print(f"epoch {epoch} validation loss {held_out.item():.4f}")
