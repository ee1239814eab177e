"""A BF16 encoder whose projections read E4M3 with one scale per tensor; one channel is a raw counter."""

import torch
import torch.nn.functional as F
from torch import nn


class Project8(nn.Linear):
    def __init__(self, channels, hidden):
        super().__init__(channels, hidden)
        used = torch.ones(channels)
        used[0] = 0  # only logged
        self.register_buffer("used", used)

    def forward(self, x):
        with torch.no_grad():
            scale = 448.0 / x.abs().amax().float()
            wide = ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)
        return F.linear(x + (wide - x).detach(), self.weight * self.used, self.bias)


class Telemetry(nn.Module):
    def __init__(self, channels=24, hidden=48):
        super().__init__()
        self.project = Project8(channels, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, x):
        return self.head(self.gru(F.silu(self.norm(self.project(x))))[0][:, -1])


def logs(n):
    x = 0.01 * torch.randn(n, 10, 24)
    y = torch.randint(2, (n,))
    x[:, :, 3] += 0.03 * (2 * y[:, None] - 1)
    x[:, :, 0] = 4e4 + torch.arange(10)  # uptime in seconds
    return x, y


torch.manual_seed(0)
model = Telemetry()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    x, y = logs(32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
