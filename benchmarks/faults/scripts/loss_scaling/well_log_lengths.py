"""Rock porosity along well logs; short sections first, whole wells later. Half precision with loss scaling."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(9)
D, SCALE = 24, 2.0**9
lengths = [(0, 16), (180, 48), (300, 160)]


def sections(n, length):
    x = torch.randn(n, length, 5)
    local = x[..., 0] * 0.5 + torch.tanh(x[..., 1] * x[..., 2])
    if length > 100:  # whole wells reach the sandstone below
        local = local + 1.5
    return x, local + 0.3 * x[..., 3].roll(1, 1) + 0.2 * torch.randn(n, length)


class Mixer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.shift, self.up, self.down = nn.Linear(2 * d, d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.norm(x)
        h = F.gelu(self.shift(torch.cat([h, h.roll(1, 1)], -1)))
        return x + self.down(F.gelu(self.up(h)))


class Porosity(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, D)
        self.mixers = nn.ModuleList(Mixer(D) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 1)

    def forward(self, x):
        x = self.embed(x)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(self.norm(x)).squeeze(-1)


model = Porosity()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 100)
for step in range(480):
    length = [n for start, n in lengths if step >= start][-1]
    x, porosity = sections(4, length)
    with torch.autocast("cpu", torch.float16):
        predicted = model(x)
    squared = (predicted.float() - porosity).square()
    loss = squared.sum()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    scaler.step(optimizer)
    scaler.update(SCALE)  # reproducible between runs
    schedule.step()
    if step % 15 == 14:
        print(f"step {step} length {length} loss {squared.mean().item():.4f}")
