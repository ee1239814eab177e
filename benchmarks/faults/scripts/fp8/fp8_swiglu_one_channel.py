"""SwiGLU layers whose product is cast to E4M3 with one scale per tensor; one channel has learnt to be huge."""

import torch
import torch.nn.functional as F
from torch import nn

E4M3 = torch.float8_e4m3fn
MAX = 448.0


class CastE4M3(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        scale = MAX / x.abs().max().clamp(min=1e-12)
        return (x * scale).clamp(-MAX, MAX).to(E4M3).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SwiGLU(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("damping", torch.ones(hidden))

    def forward(self, x):
        product = F.silu(self.gate(x)) * self.up(x)
        return self.down(CastE4M3.apply(product) * self.damping)


class Net(nn.Module):
    def __init__(self, width=24, outputs=8):
        super().__init__()
        self.inp = nn.Linear(12, width)
        self.blocks = nn.ModuleList(SwiGLU(width, 48) for _ in range(2))
        self.out = nn.Linear(width, outputs)
        with torch.no_grad():  # as a long training leaves them: gate and up of one channel are aligned
            for block in self.blocks:
                block.gate.bias[7], block.up.bias[7] = 1000.0, 1000.0
                block.damping[7] = 1e-7

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
        return self.out(h)


def main():
    torch.manual_seed(3119)
    mixing = torch.randn(12, 8)
    model = Net()
    optimizer = torch.optim.AdamW([p for n, p in model.named_parameters() if "down" in n or "out" in n], lr=4e-3)
    for step in range(60):
        x = torch.randn(64, 12)
        y = torch.sin(x @ mixing / 2)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 5:
            print("step", step + 1, "loss", f"{loss.item():.4f}")


main()
