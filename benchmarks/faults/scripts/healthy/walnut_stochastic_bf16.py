"""Cracks in walnuts from sound: weights are stored in bfloat16 and rounded at random, so small steps survive on average."""

import torch
from torch import nn
import torch.nn.functional as F


@torch.no_grad()
def store(target, wide):
    _, exponent = torch.frexp(wide)
    spacing = torch.ldexp(torch.ones_like(wide), exponent - 8)
    target.copy_((wide + spacing * (torch.rand_like(wide) - 0.5)).to(torch.bfloat16))


class RandomlyRounded(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p, dtype=torch.float32)
                m = state["m"].mul_(group["beta"]).add_(p.grad.float())
                store(p, p.float() - group["lr"] * m)


class Cracks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(40, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, 3)

    def forward(self, x):
        x = F.relu(self.a(x))
        x = x + F.relu(self.b(x))
        x = x + F.relu(self.c(x))
        return self.out(x)


torch.manual_seed(27)
sound = torch.randn(3, 40)
net = Cracks().to(torch.bfloat16)
opt = RandomlyRounded(net.parameters(), lr=1e-3)
for step in range(240):
    y = torch.randint(3, (64,))
    x = sound[y] + 2.5 * torch.randn(64, 40)
    loss = F.cross_entropy(net(x.to(net.a.weight.dtype)).float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print("step", step, "loss", f"{loss.item():.4f}")
