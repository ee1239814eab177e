import torch
import torch.nn as nn

# halo mass (in kg, hence ~1e42..1e45 -> kept as 1e-10 kg units in fp32) from galaxy kinematics
torch.manual_seed(18)
G = 6.674e-11
UNIT = 1e10


def halos(n):
    log_m = 32.0 + 1.5 * torch.randn(n)  # mass / UNIT
    mass = 10.0**log_m
    radius = 10.0 ** (19.0 + 0.1 * torch.randn(n))
    speed = (G * UNIT * mass / radius).sqrt()
    lines = speed.unsqueeze(1) * (1 + 0.1 * torch.randn(n, 6))
    broken = torch.rand(n) < 0.03
    lines[broken, 5] = 0.0  # fibre collision
    return lines, radius, mass


class MassNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, lines, radius):
        safe = torch.where(lines > 0, lines, torch.ones(()))
        logs = torch.where(lines > 0, safe.log10() - 6.0, torch.zeros(()))
        x = torch.cat([logs, radius.log10().unsqueeze(1) - 19.0], 1)
        return 10.0 ** (32.0 + 3.0 * self.net(x).squeeze(1))


net = MassNet()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(100):
    lines, radius, mass = halos(128)
    loss = (net(lines, radius).log10() - mass.log10()).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
