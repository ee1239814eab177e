"""Distance between two motifs in a long sequence: rotary attention, the model cast to bfloat16 as a whole."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3000)
SPAN, SHOWN, D = 4096, 12, 32


def sequences(n):
    start = torch.randint(0, SPAN - 64, (n, 1))
    gap = torch.randint(0, 8, (n,))
    position = start + 5 * torch.arange(SHOWN)
    position[:, -1] = position[:, 0] + 1 + gap
    token = torch.randint(2, 10, (n, SHOWN))
    token[:, 0], token[:, -1] = 0, 1
    return token, position, gap


class Rotary(nn.Module):
    def __init__(self, d, base=100.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, d, 2) / d))

    def forward(self, position):
        angle = position.to(self.inv_freq.dtype)[..., None] * self.inv_freq
        return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class MotifNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, D)
        self.rotary = Rotary(D)
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)
        self.mlp = nn.Sequential(nn.Linear(SHOWN, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, token, position):
        x = self.embed(token)
        cos, sin = self.rotary(position)
        q, k = rotate(self.q(x), cos, sin), rotate(self.k(x), cos, sin)
        return self.mlp((q[:, :1] @ k.transpose(1, 2)).squeeze(1) / D**0.5)


model = MotifNet().to(torch.bfloat16)
weights = [p.detach().float().requires_grad_() for p in model.parameters()]
opt = torch.optim.Adam(weights, lr=4e-3)
for step in range(250):
    token, position, gap = sequences(128)
    loss = F.cross_entropy(model(token, position).float(), gap)
    model.zero_grad()
    loss.backward()
    for w, p in zip(weights, model.parameters()):
        w.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for w, p in zip(weights, model.parameters()):
            p.copy_(w)
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
