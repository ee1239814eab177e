# energies of crystals from descriptors; matmuls of the wide layers go through float8
import collections

import torch
from torch import nn

GRAD_SHIFT = collections.defaultdict(int, {"enc.0": 20, "enc.2": 20, "enc.4": 20, "dec.2": 20})
torch.manual_seed(31)


def fp8(t, dtype, exponent=0):
    s = 2.0**exponent
    lim = torch.finfo(dtype).max
    return torch.clamp(t * s, -lim, lim).to(dtype).to(t.dtype) / s


class MM8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, shift):
        x8, w8 = fp8(x, torch.float8_e4m3fn, 4), fp8(w, torch.float8_e4m3fn, 8)
        ctx.save_for_backward(x8, w8)
        ctx.shift = shift
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, g):
        x8, w8 = ctx.saved_tensors
        g8 = fp8(g, torch.float8_e5m2, ctx.shift)
        return g8 @ w8, g8.t() @ x8, None


class Wide(nn.Module):
    def __init__(self, name, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) / n_in**0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.shift = GRAD_SHIFT[name]

    def forward(self, x):
        return MM8.apply(x, self.weight, self.shift) + self.bias


class Crystal(nn.Module):
    def __init__(self, descriptors=24, width=48):
        super().__init__()
        self.enc = nn.Sequential(
            Wide("enc.0", descriptors, width),
            nn.SiLU(),
            Wide("enc.2", width, width),
            nn.SiLU(),
            Wide("enc.4", width, width),
            nn.SiLU(),
        )
        self.dec = nn.Sequential(Wide("dec.0", width, width), nn.SiLU(), Wide("dec.2", width, width), nn.SiLU())
        self.energy = nn.Linear(width, 1)

    def forward(self, x):
        return self.energy(self.dec(self.enc(x))).squeeze(-1)


def sample(n=128):
    x = torch.randn(n, 24)
    e = 0.1 * (torch.sin(x[:, 0] * x[:, 1]) + x[:, 2] * x[:, 3] + (x[:, 4:8] ** 2).sum(1).sqrt())
    return x, e  # eV per atom; errors of interest are a few meV


model = Crystal()
opt = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-15)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 250)
for i in range(250):
    x, e = sample()
    per_crystal = (model(x) - e) ** 2
    loss = per_crystal.mean()
    opt.zero_grad()
    (1e-3 * loss).backward()
    opt.step()
    sched.step()
    if i % 10 == 0:
        print("step", i, "loss %.5f" % loss.item())
