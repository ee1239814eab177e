"""Walking speed from two insoles and a gyroscope. The second clinic delivers its data half way through the study."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(77)
STEPS, SWITCH, D = 700, 250, 32
insole_map, gyro_map = torch.randn(12), torch.randn(6)


def clinic(n, site):
    insole, gyro = torch.randn(n, 12), torch.randn(n, 6)
    speed = 0.6 * torch.tanh(insole @ insole_map / 3) + 0.8 * torch.sin(gyro @ gyro_map / 2)
    if site == 2:
        gyro = gyro * 57.2958  # this gyroscope reports degrees per second
    return insole, gyro, speed


class Branch(nn.Module):
    def __init__(self, n_in, d):
        super().__init__()
        self.project = nn.Linear(n_in, d)
        self.act = nn.Tanh()
        self.mix = nn.Linear(d, d)

    def forward(self, x):
        return self.mix(self.act(self.project(x)))


class Gait(nn.Module):
    def __init__(self):
        super().__init__()
        self.insole, self.gyro = Branch(12, D), Branch(6, D)
        self.norm = nn.LayerNorm(2 * D)
        self.trunk = nn.ModuleList(nn.Linear(2 * D, 2 * D) for _ in range(2))
        self.out = nn.Linear(2 * D, 1)

    def forward(self, insole, gyro):
        x = self.norm(torch.cat([self.insole(insole), self.gyro(gyro)], 1))
        for layer in self.trunk:
            x = x + F.silu(layer(x))
        return self.out(x).squeeze(1)


class Study:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: min(1.0, (s + 1) / 50))

    def step(self, batch):
        insole, gyro, speed = batch
        loss = F.smooth_l1_loss(self.model(insole, gyro), speed, beta=0.1)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


model = Gait()
study = Study(model)
for step in range(STEPS):
    batch = clinic(128, 1 if step < SWITCH else 2)
    value = study.step(batch)
    if step % 20 == 19:
        print(f"step {step} site {1 if step < SWITCH else 2} loss {value:.4f}")
with torch.no_grad():
    units = model.gyro.act(model.gyro.project(batch[1]))
