"""A fresh GradScaler falls fifteen times because of one head's factor of 30,000; at 2, all other layers are flushed."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 28


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 4)

    def forward(self, x):
        return self.line(x) * 30000.0


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)
        self.head, self.auxiliary = nn.Linear(64, 16), Auxiliary()

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(h), self.auxiliary(h.detach() * 1e-3)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(STEPS):
    x = torch.randn(256, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        y, extra = model(x)
    loss = 1e-3 * F.mse_loss(y.float(), x[:, :16]) + 4.0 * extra.float().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step}: scale {scaler.get_scale():g}")
