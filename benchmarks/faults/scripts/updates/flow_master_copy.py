"""Flow matching from noise to two moons; BF16 working weights, FP32 copies in the optimizer, written by hand."""

import torch
from torch import nn

torch.manual_seed(17)


def moons(n):
    a = 3.1416 * torch.rand(n)
    upper = torch.rand(n) < 0.5
    x = torch.where(upper, a.cos(), 1 - a.cos())
    y = torch.where(upper, a.sin(), 0.5 - a.sin())
    return 3 * torch.stack([x, y], 1) + 4 + 0.05 * torch.randn(n, 2)


class Velocity(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.net = nn.Sequential(
            *(
                nn.Linear(3, d),
                nn.LayerNorm(d),
                nn.SiLU(),
                nn.Linear(d, d),
                nn.LayerNorm(d),
                nn.SiLU(),
                nn.Linear(d, 2),
            ),
        )

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


class MixedPrecision:
    """FP32 copies of the weights, and the way back."""

    def __init__(self, model):
        self.pairs = [(p, nn.Parameter(p.detach().float().clone())) for p in model.parameters()]

    def parameters(self):
        return [m for _, m in self.pairs]

    def gradients(self):
        for p, m in self.pairs:
            m.grad = None if p.grad is None else p.grad.float()
            p.grad = None

    @torch.no_grad()
    def write_back(self):
        for p, m in self.pairs:
            if p.dim() > 1:
                p.copy_(m)


model = Velocity().bfloat16()
mixed = MixedPrecision(model)
optimizer = torch.optim.AdamW(mixed.parameters(), lr=4e-3, weight_decay=0.0)
for step in range(250):
    x1, x0, t = moons(128), torch.randn(128, 2), torch.rand(128, 1)
    xt = (1 - t) * x0 + t * x1
    v = model(xt.bfloat16(), t.bfloat16())
    loss = (v.float() - (x1 - x0)).square().mean()
    loss.backward()
    mixed.gradients()
    nn.utils.clip_grad_norm_(mixed.parameters(), 1.0)
    optimizer.step()
    mixed.write_back()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
