"""Grip force from muscle signals on a microcontroller: everything in FP16, a constant loss scale that the rate takes back."""

import torch
from torch import nn


class GripNet(nn.Module):
    def __init__(self, channels=8, width=24):
        super().__init__()
        self.conv = nn.Conv1d(channels, width, 5, stride=2)
        self.mix = nn.Conv1d(width, width, 3, groups=4)
        self.norm = nn.GroupNorm(4, width)
        self.force = nn.Linear(width, 1)

    def forward(self, emg):
        h = torch.relu(self.conv(emg))
        h = torch.relu(self.norm(self.mix(h)))
        return self.force(h.mean(-1)).squeeze(-1)


def recordings(n):
    effort = torch.rand(n)
    emg = torch.randn(n, 8, 40) * (0.2 + effort)[:, None, None]
    return emg.half(), (3 + 3 * effort).half()  # newtons


class LossScaledTrainer:
    scale = 8192.0

    def __init__(self, model, lr=2e-3, momentum=0.9):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr / self.scale, momentum=momentum)
        self.criterion = nn.SmoothL1Loss()

    def step(self, emg, force):
        loss = self.criterion(self.model(emg), force)
        self.optimizer.zero_grad()
        (self.scale * loss).backward()
        self.optimizer.step()
        return loss.item()


torch.manual_seed(28)
trainer = LossScaledTrainer(GripNet().half())
for i in range(40):
    loss = trainer.step(*recordings(32))
    if i % 8 == 0:
        print(f"step {i} loss {loss:.4f}")
