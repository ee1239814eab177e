"""Orchard yield from weather and soil; after the warmup a monitor follows the gradients of the soil encoder."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(31)
wm, sm = torch.randn(14), torch.randn(9)


def seasons(n):
    weather, soil = torch.randn(n, 14), torch.randn(n, 9)
    z = soil @ sm / 3
    return weather, soil, torch.tanh(weather @ wm / 4) + 0.7 * torch.sin(3 * z) + 0.4 * z


def encoder(n_in, d):
    return nn.Sequential(nn.Linear(n_in, d), nn.LayerNorm(d), nn.GELU(), nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))


class Yield(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.weather, self.soil = encoder(14, d), encoder(9, d)
        self.fuse = nn.ModuleList(nn.Linear(2 * d, 2 * d) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(2 * d), nn.Linear(2 * d, 1)

    def forward(self, weather, soil):
        x = torch.cat([self.weather(weather), self.soil(soil)], 1)
        for layer in self.fuse:
            x = x + F.gelu(layer(x))
        return self.out(self.norm(x)).squeeze(1)


class Monitor:
    """Norms of true gradients, every step from ``start`` on."""

    def __init__(self, module, scaler, start):
        self.module, self.scaler, self.start = module, scaler, start
        self.norms = []

    def __call__(self, step):
        if step < self.start:
            return
        scale = self.scaler.get_scale()
        true = [p.grad.div_(scale) for p in self.module.parameters()]
        self.norms.append(torch.stack([g.norm() for g in true]).norm().item())


model = Yield()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=400)
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, 150)
monitor = Monitor(model.soil, scaler, start=200)
for step in range(600):
    weather, soil, target = seasons(96)
    with torch.autocast("cpu", torch.float16):
        out = model(weather, soil)
    loss = F.smooth_l1_loss(out.float(), target, beta=0.2)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    monitor(step)
    scaler.step(optimizer)
    scaler.update()
    warm.step()
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f} soil {monitor.norms[-1] if monitor.norms else 0:.2e}")
