"""Seismic phase picking with 8-bit linear layers."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
TOP = {E4M3: 448.0, E5M2: 57344.0}


def through(x, scale, dtype):
    top = TOP[dtype]
    return (x * scale).clamp(-top, top).to(dtype).to(x.dtype) / scale


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, grad_scale):
        ctx.grad_scale = grad_scale
        return through(x, scale, E4M3)

    @staticmethod
    def backward(ctx, g):
        return through(g, TOP[E5M2] / g.abs().max().clamp(min=1e-12), E5M2), None, None


class Linear8(nn.Linear):
    """Weights are scaled by their current range, inputs by the range seen when the layer was set up."""

    def __init__(self, a, b):
        super().__init__(a, b)
        self.register_buffer("input_scale", torch.zeros(()))

    def forward(self, x):
        if self.input_scale == 0:
            self.input_scale = TOP[E4M3] / 2 / x.detach().abs().max().clamp(min=1e-12)
        w = Quantise.apply(self.weight, TOP[E4M3] / self.weight.detach().abs().max(), 1.0)
        return F.linear(Quantise.apply(x, self.input_scale, 1.0), w, self.bias)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = Linear8(d, 2 * d)
        self.down = Linear8(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Side(nn.Module):
    """The polarisation path, faded in by a learned gain per channel."""

    def __init__(self, a, d):
        super().__init__()
        self.enc = nn.Linear(a, d)
        self.gain = nn.Parameter(torch.full((d,), 0.01))
        self.merge = Linear8(d, d)

    def forward(self, p):
        return self.merge(torch.tanh(self.enc(p)) * self.gain)


class Picker(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.wave = nn.Linear(30, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(3))
        self.side = Side(6, d)
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 1))

    def forward(self, w, p):
        x = self.wave(w)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                x = x + self.side(p)
        return self.head(x).squeeze(-1)


def picks(n):
    w, p = torch.randn(n, 30), torch.randn(n, 6)
    return w, p, w[:, :5].mean(1) + 2.0 * torch.sin(2 * p[:, 0] + p[:, 1]) + p[:, 2] * p[:, 3]


if __name__ == "__main__":
    torch.manual_seed(12)
    net = Picker()
    groups = [
        {"params": [p for n, p in net.named_parameters() if not n.endswith("gain")], "lr": 3e-3},
        {"params": [net.side.gain], "lr": 3e-2},
    ]
    opt = torch.optim.AdamW(groups, weight_decay=0.0)
    for it in range(200):
        w, p, arrival = picks(64)
        loss = F.smooth_l1_loss(net(w, p), arrival)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 10 == 0:
            print(f"[{it:3d}] loss={loss.item():.4f}")
