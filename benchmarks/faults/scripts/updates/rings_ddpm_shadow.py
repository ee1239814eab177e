# epsilon-prediction diffusion on noisy rings; what is sampled and validated is the shadow copy
import copy

import torch
from torch import nn

torch.manual_seed(60)
STEPS = 50
beta = torch.linspace(1e-3, 0.12, STEPS)
alpha_bar = (1 - beta).cumprod(0)


def rings(n):
    phi = 2 * torch.pi * torch.rand(n)
    r = torch.where(torch.rand(n) < 0.5, 0.6, 1.4) + 0.04 * torch.randn(n)
    return torch.stack([r * phi.cos(), r * phi.sin()], 1)


class FiLM(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc, self.mod = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(32, 2 * d)

    def forward(self, h, c):
        scale, shift = self.mod(c).chunk(2, -1)
        return h + self.fc(nn.functional.silu(self.norm(h) * (1 + scale) + shift))


class Eps(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.time = nn.Embedding(STEPS, 32)
        self.inp = nn.Linear(2, d)
        self.layers = nn.ModuleList(FiLM(d) for _ in range(3))
        self.out = nn.Linear(d, 2)

    def forward(self, x, t):
        c, h = self.time(t), self.inp(x)
        for layer in self.layers:
            h = layer(h, c)
        return self.out(h)


def objective(model, x, t, eps):
    a = alpha_bar[t][:, None]
    return (model(a.sqrt() * x + (1 - a).sqrt() * eps, t) - eps).square().mean()


class Shadow:
    def __init__(self, model, decay):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.model.parameters(), model.parameters(), strict=True):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)


net = Eps()
shadow = Shadow(net, decay=0.9999)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
val = rings(512), torch.randint(STEPS, (512,)), torch.randn(512, 2)
for it in range(300):
    t = torch.randint(STEPS, (128,))
    train = objective(net, rings(128), t, torch.randn(128, 2))
    opt.zero_grad()
    train.backward()
    opt.step()
    shadow.update(net)
    if it % 10 == 0:
        with torch.no_grad():
            print(f"{it} train {train.item():.4f} shadow loss {objective(shadow.model, *val).item():.4f}")
