"""Delayed scaling with a history of 1024 steps; one batch is 32 times as large, which E4M3 has binades for."""

import collections

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn
WIDTH, STEPS = 64, 20


class DelayedQuantiser(nn.Module):
    """The scale follows from the largest amax of the last steps; the gradient passes straight through."""

    def __init__(self, history):
        super().__init__()
        self.amaxes = collections.deque(maxlen=history)
        self.scale = torch.ones(())

    def forward(self, x):
        with torch.no_grad():
            usable = [a for a in self.amaxes if a > 0]
            if usable:
                self.scale = 448.0 / max(usable)
            self.amaxes.append(x.abs().amax())
            seen = (x * self.scale).clamp(-448.0, 448.0).to(E4M3).float() / self.scale
        return x + (seen - x).detach()


class FP8Linear(nn.Module):
    def __init__(self, inputs, outputs, history):
        super().__init__()
        self.quantise_input, self.quantise_weight = DelayedQuantiser(history), DelayedQuantiser(history)
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x):
        return self.quantise_input(x) @ self.quantise_weight(self.weight).t()


torch.manual_seed(0)
model = nn.Sequential(FP8Linear(WIDTH, WIDTH, 1024), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x = torch.randn(64, WIDTH) * (32.0 if step == 4 else 1.0)
    loss = (model(x) - x[:, :1].sign()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
