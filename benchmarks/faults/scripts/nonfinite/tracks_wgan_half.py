"""A GAN of vehicle tracks to a given goal, with two optimizers and one GradScaler; the generator's gradients are clipped."""

import torch
import torch.nn.functional as F
from torch import nn


def track(n, length=16):
    t = torch.arange(length) / 4
    heading = 6.28 * torch.rand(n, 1) + 0.4 * torch.randn(n, 1) * t
    steps = torch.stack([heading.cos(), heading.sin()], -1)
    return 30 * steps.cumsum(1)  # metres


class Generator(nn.Module):
    def __init__(self, z=10, width=64, length=16):
        super().__init__()
        self.length = length
        self.fc = nn.Sequential(nn.Linear(z, width), nn.LeakyReLU(0.1), nn.Linear(width, width), nn.LeakyReLU(0.1))
        self.steps = nn.Linear(width, 2 * length)

    def forward(self, z, goal):
        v = self.steps(self.fc(torch.cat([z, goal / 100], -1))).view(-1, self.length, 2)
        return 30 * v.cumsum(1)


class Critic(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(2, width, 5, stride=2, padding=2),
            nn.LeakyReLU(0.1),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.LeakyReLU(0.1),
        )
        self.score = nn.Linear(4 * width, 1)

    def forward(self, x):
        return self.score(self.conv(x.transpose(1, 2) / 100).flatten(1)).squeeze(-1)


torch.manual_seed(33)
gen, critic = Generator(), Critic()
opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
scaler = torch.amp.GradScaler("cpu", growth_interval=3, init_scale=64.0)
for it in range(40):
    real, z = track(24), torch.randn(24, 8)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = gen(z, real[:, -1])
        loss_c = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake.detach())).mean()
    opt_c.zero_grad()
    scaler.scale(loss_c.float()).backward()
    scaler.step(opt_c)

    with torch.autocast("cpu", dtype=torch.float16):
        fake = gen(z, real[:, -1])
        arrival = F.mse_loss(fake[:, -1], real[:, -1].half())
        loss_g = 0.002 * arrival - critic(fake).mean()
    opt_g.zero_grad()
    scaler.scale(loss_g.float()).backward()
    scaler.unscale_(opt_g)
    torch.nn.utils.clip_grad_norm_(gen.parameters(), 1.0)
    opt_g.step()
    scaler.update()
    if it % 8 == 0:
        print(f"it {it} critic {loss_c.item():.3f} generator {loss_g.item():.3f} scale {scaler.get_scale():.0f}")
