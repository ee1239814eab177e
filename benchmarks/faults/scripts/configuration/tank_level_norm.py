"""Leaks in storage tanks from level and temperature. Later tanks report the level against the national datum, in mm."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(61)
T = 24


class WindowNorm(nn.Module):
    """Standardizes each window; both moments in one pass."""

    def __init__(self, eps=1e-4):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        n = x.shape[-1]
        total, squares = x.sum(-1, keepdim=True), (x * x).sum(-1, keepdim=True)
        mean = total / n
        var = (squares / n - mean * mean).clamp(min=0)
        return self.gain * ((x - mean) / (var + self.eps).sqrt()).clamp(-4, 4)


class LeakNet(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.level_norm = WindowNorm()
        self.level = nn.Sequential(nn.Linear(T, d), nn.ReLU(), nn.Linear(d, d))
        self.temperature = nn.Sequential(nn.Linear(T, d), nn.ReLU(), nn.Linear(d, d))
        self.out = nn.Linear(2 * d, 3)

    def forward(self, level, temperature):
        z = torch.cat([self.level(self.level_norm(level)), self.temperature(temperature)], 1)
        return self.out(F.relu(z))


def windows(n, datum):
    kind = torch.randint(3, (n,))
    t = torch.linspace(-1, 1, T)
    # no leak: waves; slow leak: a bend; fast leak: a step
    wave = torch.sin(9 * t + 6.28 * torch.rand(n, 1))
    shape = torch.stack([wave, (t**2).expand(n, T), torch.sign(t - torch.rand(n, 1) + 0.5)], 1)
    level = shape[torch.arange(n), kind] + 0.3 * torch.randn(n, T)
    offset = 20.0 * torch.randn(n, 1) if not datum else 30000.0 + 9000.0 * torch.rand(n, 1)
    temperature = torch.randn(n, T) + 0.25 * (kind[:, None] - 1)
    return level + offset, temperature, kind


model = LeakNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 420, eta_min=2e-4)
for step in range(420):
    level, temperature, kind = windows(48, datum=step >= 170)
    loss = F.cross_entropy(model(level, temperature), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 6 == 5:
        print(f"step {step + 1} loss {loss.item():.4f}")
