"""Four-bit weights and eight-bit activations with a straight-through estimator and learnt step sizes (LSQ)."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class LSQ(nn.Module):
    def __init__(self, bits):
        super().__init__()
        self.low, self.high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self.log_step = nn.Parameter(torch.tensor(0.0))
        self.ready = False

    def forward(self, x):
        if not self.ready:
            self.log_step.data.fill_(float(torch.log(2 * x.detach().abs().mean() / self.high**0.5)))
            self.ready = True
        scale = 1 / (x.numel() * self.high) ** 0.5
        step = self.log_step.exp()
        step = step * scale + (step * (1 - scale)).detach()
        return RoundSTE.apply((x / step).clamp(self.low, self.high)) * step


class QLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.weight_quantizer, self.input_quantizer = LSQ(4), LSQ(8)

    def forward(self, x):
        return F.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)


def spectra(n, peaks):
    y = torch.randint(len(peaks), (n,))
    axis = torch.linspace(0, 1, 40)
    shift = 0.02 * torch.randn(n, 1)
    x = torch.exp(-(((axis - peaks[y, :1] - shift) / 0.05) ** 2)) + torch.exp(
        -(((axis - peaks[y, 1:] - shift) / 0.05) ** 2)
    )
    return x + 0.1 * torch.randn(n, 40), y


def main():
    torch.manual_seed(7030)
    peaks = torch.rand(8, 2)
    model = nn.Sequential(QLinear(40, 64), nn.LayerNorm(64), nn.ReLU(), QLinear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(100):
        x, y = spectra(64, peaks)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")


main()
