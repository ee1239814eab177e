"""Formation energies from composition vectors; forward in e4m3 with scales, the backward pass has its own cast."""

import torch
import torch.nn as nn

torch.manual_seed(19)
ELEMENTS = 24
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pair = torch.randn(ELEMENTS, ELEMENTS) / 3


def compounds(n):
    x = torch.zeros(n, ELEMENTS)
    for _ in range(3):
        x[torch.arange(n), torch.randint(ELEMENTS, (n,))] += 1 / 3
    return x, ((x @ pair) * x).sum(1, keepdim=True)


def fake_cast(t, dtype, scale):
    return (t * scale).to(dtype).float() / scale


class Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        sx, sw = 224 / x.abs().amax().clamp(min=1e-12), 224 / w.abs().amax().clamp(min=1e-12)
        qx, qw = fake_cast(x, E4M3, sx), fake_cast(w, E4M3, sw)
        ctx.save_for_backward(qx, qw)
        return qx @ qw.T

    @staticmethod
    def backward(ctx, g):
        qx, qw = ctx.saved_tensors
        qg = fake_cast(g, E4M3, 1.0)
        return qg @ qw, qg.T @ qx


class Linear8(nn.Linear):
    def forward(self, x):
        return Fp8Matmul.apply(x, self.weight) + self.bias


class EnergyNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.inp = nn.Linear(ELEMENTS, width)
        self.mid1, self.mid2 = Linear8(width, width), Linear8(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.nn.functional.silu(self.inp(4 * x))
        h = torch.nn.functional.silu(self.mid1(h))
        h = torch.nn.functional.silu(self.mid2(h))
        return self.out(h)


torch.manual_seed(1)
net = EnergyNet()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
x, e = compounds(1024)
for epoch in range(30):
    running = 0.0
    for idx in torch.randperm(1024).split(256):
        loss = nn.functional.mse_loss(net(x[idx]), e[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item() / 4
    print(f"epoch {epoch} loss {running:.5f}")
