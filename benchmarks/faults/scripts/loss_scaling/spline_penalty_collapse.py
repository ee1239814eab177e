"""Additive spline net, FP16 autocast and GradScaler; a smoothness penalty weighted for a loss that was a sum once."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SplineNet(nn.Module):
    def __init__(self, features=6, knots=16):
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, knots))
        self.mix = nn.Linear(features * knots, 32)
        self.hidden = nn.Linear(32, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, x):
        basis = torch.exp(-4 * (x.unsqueeze(-1) - self.centres) ** 2).flatten(1)
        h = torch.tanh(self.mix(basis))
        self.last = self.hidden(h)
        return self.out(F.silu(self.last))


torch.manual_seed(83)
net = SplineNet()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
PENALTY = 4e8
for it in range(60):
    x = torch.randn(64, 6)
    y = torch.stack([torch.sin(2 * x[:, 0]) + x[:, 1], x[:, 2] * x[:, 3]], 1)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
        rough = (net.last - net.last.roll(1, 0)).float().pow(2).mean()
        loss = F.mse_loss(out.float(), y) + PENALTY * rough
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 2 == 0:
        print(f"it {it} loss {loss.item():.4e} scale {scaler.get_scale():g}")
