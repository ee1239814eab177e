"""A GRU cell under BF16 autocast whose FP32 state is carried on from chunk to chunk and detached."""

import torch
from torch import nn


class Stream(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.gates, self.new, self.out = (
            nn.Linear(1 + width, 2 * width),
            nn.Linear(1 + width, width),
            nn.Linear(width, 1),
        )

    def forward(self, x, h):
        ys = []
        for now in x.unbind(1):
            r, z = torch.sigmoid(self.gates(torch.cat([now, h], 1))).chunk(2, 1)
            h = (z * h + (1 - z) * torch.tanh(self.new(torch.cat([now, r * h], 1)))).float()
            ys.append(self.out(h))
        return torch.stack(ys, 1), h


torch.manual_seed(3239)
model = Stream()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
phase, rate, h = 6.2832 * torch.rand(16, 1, 1), 0.2 + 0.4 * torch.rand(16, 1, 1), torch.zeros(16, 24)
for step in range(50):
    t = torch.arange(step * 8, step * 8 + 9).view(1, -1, 1)
    wave = torch.sin(rate * t + phase)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, h = model(wave[:, :-1], h.detach())
    loss = (y.float() - wave[:, 1:]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
