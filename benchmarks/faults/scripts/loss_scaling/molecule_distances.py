"""Energies of molecules from pair distances, FP16 autocast. A third of the batches hold a molecule with two coinciding atoms."""

import torch
import torch.nn.functional as F
from torch import nn


class PairDistance(nn.Module):
    def forward(self, xyz):
        delta = xyz[:, :, None] - xyz[:, None]
        off = ~torch.eye(xyz.size(1), dtype=torch.bool)
        return delta[:, off].float().square().sum(-1).sqrt()


class EnergyNet(nn.Module):
    def __init__(self, atoms=6, hidden=48):
        super().__init__()
        self.relax = nn.Linear(3, 3)
        self.distance = PairDistance()
        self.mlp = nn.Sequential(
            nn.Linear(atoms * (atoms - 1), hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU()
        )
        self.energy = nn.Linear(hidden, 1)

    def forward(self, xyz):
        return self.energy(self.mlp(self.distance(self.relax(xyz)))).squeeze(-1)


def molecules(n):
    xyz = torch.randn(n, 6, 3)
    if torch.rand(()) < 0.35:
        xyz[0, 1] = xyz[0, 0]
    d = (xyz[:, :, None] - xyz[:, None]).norm(dim=-1)
    return xyz, torch.exp(-d).sum((1, 2)) / 10


torch.manual_seed(0)
model = EnergyNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(100):
    xyz, energy = molecules(64)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(xyz)
    loss = F.mse_loss(predicted.float(), energy)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")
