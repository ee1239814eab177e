"""An FP8 MLP with delayed scaling; the history is fed with what comes out of the cast, which was clipped already."""

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class Delayed(nn.Module):
    def __init__(self, length=8):
        super().__init__()
        self.register_buffer("amax_history", torch.full((length,), 0.5))
        self.register_buffer("scale", torch.tensor(LARGEST / 0.5))

    def forward(self, x):
        y = (x.detach() * self.scale).clamp(-LARGEST, LARGEST).to(E4M3).to(x.dtype) / self.scale
        if self.training:
            self.amax_history.copy_(self.amax_history.roll(1))
            self.amax_history[0] = y.abs().max()
            self.scale.copy_(LARGEST / self.amax_history.max())
        return x + (y - x.detach())


class Linear8(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.cast_x = Delayed()

    def forward(self, x):
        return nn.functional.linear(self.cast_x(x), self.weight, self.bias)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(12, 64)
        self.mid1, self.mid2 = Linear8(64, 64), Linear8(64, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        h = torch.relu(self.inp(x))
        h = torch.relu(self.mid1(h))
        return self.out(torch.relu(self.mid2(h))).squeeze(-1)


torch.manual_seed(90)
model = Energy()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    x = 2 * torch.randn(64, 12)
    y = x[:, :6].square().sum(1).sqrt() + (x[:, 6] * x[:, 7])
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
