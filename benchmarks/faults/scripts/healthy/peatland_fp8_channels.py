"""Peat depth from spectra: FP8 matrix products, one scale for each channel, whose loudness differs a thousandfold."""

import torch
import torch.nn as nn
import torch.nn.functional as F

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantize(x, dim, dtype):
    scale = LARGEST[dtype] / x.abs().amax(dim, keepdim=True).clamp(min=1e-20)
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x * scale).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).to(x.dtype) / scale


class ScaledProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        xq, wq = quantize(x, 0, torch.float8_e4m3fn), quantize(w, 0, torch.float8_e4m3fn)
        ctx.save_for_backward(xq, wq)
        return xq @ wq.t()

    @staticmethod
    def backward(ctx, gradient):
        xq, wq = ctx.saved_tensors
        g = quantize(gradient, 1, torch.float8_e5m2)
        return g @ wq, g.t() @ xq


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return ScaledProduct.apply(x, self.weight) + self.bias


class PeatNet(nn.Module):
    def __init__(self, bands=40, hidden=64):
        super().__init__()
        self.register_buffer("loudness", torch.logspace(-1, 2, bands))
        self.fc1, self.fc2, self.depth = Fp8Linear(bands, hidden), Fp8Linear(hidden, hidden), nn.Linear(hidden, 1)
        with torch.no_grad():
            self.fc1.weight /= self.loudness

    def forward(self, spectrum):
        h = F.silu(self.fc1(spectrum))
        return self.depth(h + F.silu(self.fc2(h))).squeeze(-1)


def main():
    torch.manual_seed(313)
    net = PeatNet()
    mixing = torch.randn(40, 3) / 4
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for step in range(250):
        state = torch.randn(64, 40)
        depth = torch.tanh(state @ mixing).sum(1)
        loss = F.mse_loss(net(state * net.loudness), depth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
