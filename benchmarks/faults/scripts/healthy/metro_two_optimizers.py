"""Passengers per metro station: embeddings and network have their own optimizers, one loss scale, tight clipping."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1863)
STATIONS = 40
level, w = torch.randn(STATIONS), torch.randn(7)


def hours(n):
    station, x = torch.randint(STATIONS, (n,)), torch.randn(n, 7)
    return station, x, level[station] + torch.sin(x @ w / 2)


class Passengers(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.station = nn.Embedding(STATIONS, 12)
        self.inp = nn.Linear(19, d)
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.out = nn.Linear(d, 1)

    def forward(self, station, x):
        h = self.inp(torch.cat([self.station(station), x], 1))
        for norm, layer in zip(self.norms, self.layers):
            h = h + F.gelu(layer(norm(h)))
        return self.out(h).squeeze(1)


model = Passengers()
network = [p for n, p in model.named_parameters() if not n.startswith("station")]
optimizers = [
    torch.optim.Adam(model.station.parameters(), lr=1e-2),
    torch.optim.SGD(network, lr=0.5, momentum=0.9),
]
limits = [0.1, 0.05]
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=150)
for step in range(500):
    station, x, passengers = hours(96)
    with torch.autocast("cpu", torch.float16):
        out = model(station, x)
    loss = F.mse_loss(out.float(), passengers)
    model.zero_grad()
    scaler.scale(loss).backward()
    for optimizer, limit in zip(optimizers, limits):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], limit)
        scaler.step(optimizer)
    scaler.update()
    optimizers[1].param_groups[0]["lr"] = 0.5 * (1 - step / 500)
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f}")
