"""Which field an invoice token belongs to. Linear layers run in float8 (emulated: quantise, matmul in fp32)."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(15)
E4M3 = torch.float8_e4m3fn
FIELDS, DIM = 7, 24


def fp8(x):
    limit = torch.finfo(E4M3).max
    return x.clamp(-limit, limit).to(E4M3).to(x.dtype)


class QuantizeSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        return fp8(x * scale) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Linear8(nn.Linear):
    def forward(self, x):
        w_scale = 448.0 / self.weight.detach().abs().amax()
        w = QuantizeSTE.apply(self.weight, w_scale)
        return F.linear(QuantizeSTE.apply(x, 448.0), w, self.bias)


class FieldNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.proj = nn.Linear(DIM, width)
        self.fc1 = Linear8(width, 2 * width)
        self.fc2 = Linear8(2 * width, width)
        self.out = nn.Linear(width, FIELDS)

    def forward(self, x):
        h = self.proj(x)
        h = self.fc2(F.relu(self.fc1(h)))
        return self.out(h)


centres = torch.randn(FIELDS, 2, DIM)


def tokens(n):
    y = torch.randint(FIELDS, (n,))
    habit = torch.randint(2, (n,))
    size = torch.exp(0.4 * y.unsqueeze(1) + 0.1 * torch.randn(n, 1))  # fields come in sizes
    return size * (centres[0, habit] + 0.1 * torch.randn(n, DIM)), y


net = FieldNet()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(150):
    x, y = tokens(128)
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
