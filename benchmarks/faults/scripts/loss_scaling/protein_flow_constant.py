"""Conditional flow matching on short backbones (torsion-built 3-D chains), fp16 autocast."""

import torch
from torch import nn

torch.manual_seed(77)
N = 16


def chains(n):
    turn = 0.6 + 0.2 * torch.randn(n, 1)
    s = torch.arange(N).float()
    xyz = torch.stack([torch.cos(turn * s), torch.sin(turn * s), 0.2 * s.expand(n, N)], -1)
    return xyz - xyz.mean(1, keepdim=True)


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.tokens = nn.Linear(N, N)
        self.channels = nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.tokens(self.norm(x).mT).mT
        return x + self.channels(self.norm(x))


class Velocity(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.inp = nn.Linear(3, d)
        self.time = nn.Sequential(nn.Linear(16, d), nn.SiLU(), nn.Linear(d, d))
        self.mixers = nn.Sequential(*(Mixer(d) for _ in range(3)))
        self.out = nn.Linear(d, 3)
        self.register_buffer("freq", torch.logspace(0, 1.5, 8))

    def forward(self, x, t):
        angle = t * self.freq
        time = self.time(torch.cat([angle.sin(), angle.cos()], -1)).unsqueeze(1)
        return self.out(self.mixers(self.inp(x) + time))


net = Velocity()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
for it in range(120):
    x1 = chains(32)
    x0, t = torch.randn_like(x1), torch.rand(32, 1)
    xt = torch.lerp(x0, x1, t.unsqueeze(-1))
    with torch.autocast("cpu", dtype=torch.float16):
        v = net(xt, t)
    err = (v.float() - (x1 - x0)).square().sum((1, 2))
    loss = err.mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update(2.0**18)
    if it % 3 == 0:
        print(f"{it:4d}  loss {loss.item():8.3f}")
