# Surrogate for a heat exchanger, with the gradient GEMMs in float8 e5m2.
import torch
import torch.nn as nn

torch.manual_seed(72)


class Fp8Gemm(torch.autograd.Function):
    """y = x w^T; forward operands in e4m3 (scaled by amax), the incoming gradient in e5m2."""

    @staticmethod
    def forward(ctx, x, w):
        sx, sw = 448.0 / x.abs().amax().clamp(min=1e-12), 448.0 / w.abs().amax().clamp(min=1e-12)
        xq, wq = (x * sx).to(torch.float8_e4m3fn), (w * sw).to(torch.float8_e4m3fn)
        ctx.save_for_backward(xq, wq)
        ctx.scales = sx, sw
        return (xq.float() / sx) @ (wq.float() / sw).T

    @staticmethod
    def backward(ctx, grad):
        xq, wq = ctx.saved_tensors
        sx, sw = ctx.scales
        g = grad.to(torch.float8_e5m2).float()
        return g @ (wq.float() / sw), g.T @ (xq.float() / sx)


class Dense(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * n_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return Fp8Gemm.apply(x, self.weight) + self.bias


class Exchanger(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.h1 = Dense(width, width)
        self.h2 = Dense(width, width)
        self.out = nn.Linear(width, 16)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        h = torch.tanh(self.h1(h))
        h = torch.tanh(self.h2(h))
        return self.out(h)


probe_points = torch.linspace(0, 1, 16)


def runs(n):
    x = torch.randn(n, 5)
    y = torch.sin(2 * x[:, :1] + 4 * probe_points) * x[:, 1:2].abs() + 0.3 * x[:, 2:3] * probe_points
    return x, 0.1 * y


model = Exchanger()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for i in range(150):
    x, y = runs(512)
    loss = ((model(x) - y) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 5 == 0:
        print(f"{i:4d}  loss {100 * loss.item():.5f}")
