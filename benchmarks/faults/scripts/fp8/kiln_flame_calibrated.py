"""Kiln temperature from flame and shell sensors; linear layers in emulated e4m3, scales from a calibration phase."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(12)
LARGEST, STEPS, FIRING = 448.0, 520, 200
flame_map, shell_map = torch.randn(10), torch.randn(8)


class Cast(torch.autograd.Function):
    """To e4m3 and back; the gradient passes."""

    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, g):
        return g, None


class Linear8(nn.Linear):
    def __init__(self, n_in, n_out, calibrate=80):
        super().__init__(n_in, n_out)
        self.calibrate, self.calls, self.amax = calibrate, 0, 1e-6

    def forward(self, x):
        if self.calls < self.calibrate:
            self.amax = max(self.amax, x.detach().abs().max().item())
        self.calls += 1
        x = Cast.apply(x, LARGEST / self.amax)
        w = Cast.apply(self.weight, LARGEST / self.weight.detach().abs().max())
        return F.linear(x, w, self.bias)


def sensors(n, firing):
    flame, shell = torch.randn(n, 10), torch.randn(n, 8)
    if firing:
        flame = flame * (1 + 7 * torch.rand(n, 1))
    heat = (flame @ flame_map / 3).clamp(-20, 20)
    return flame, shell, 0.3 * heat + torch.tanh(shell @ shell_map / 2)


class Kiln(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.flame, self.shell = Linear8(10, d), Linear8(8, d)
        self.norms = nn.ModuleList(nn.LayerNorm(2 * d) for _ in range(2))
        self.layers = nn.ModuleList(Linear8(2 * d, 2 * d) for _ in range(2))
        self.out = nn.Linear(2 * d, 1)

    def forward(self, flame, shell):
        x = torch.cat([self.flame(flame), self.shell(shell)], 1)
        for norm, layer in zip(self.norms, self.layers):
            x = x + F.silu(layer(norm(x)))
        return self.out(x).squeeze(1)


model = Kiln()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 40)
for step in range(STEPS):
    flame, shell, temperature = sensors(96, step >= FIRING)
    loss = F.smooth_l1_loss(model(flame, shell), temperature)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 20 == 19:
        print(f"{'firing' if step >= FIRING else 'heating'} step {step} loss {loss.item():.4f}")
