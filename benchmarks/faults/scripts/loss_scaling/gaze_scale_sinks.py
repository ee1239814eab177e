"""Gaze and pupils from eye features: one head's output is multiplied up to pixels in FP16, and the loss scale pays for it."""

import torch
import torch.nn.functional as F
from torch import nn

PIXELS = 6000.0


class EyeNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.stem = nn.Linear(20, width)
        self.block = nn.Linear(width, width)
        self.pupil = nn.Linear(width, 96)
        self.gaze = nn.Linear(20, 2)

    def forward(self, x):
        h = F.silu(self.block(F.silu(self.stem(x))))
        return self.pupil(h), self.gaze(x) * PIXELS


class Trainer:
    def __init__(self):
        torch.manual_seed(3114)
        self.to_pupil, self.to_gaze = torch.randn(20, 96) / 5, torch.randn(20, 2) / 5
        self.net = EyeNet()
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=3e-3, eps=1e-14)
        self.scaler = torch.amp.GradScaler("cpu")

    def sample(self, n=64):
        x = torch.randn(n, 20)
        return x, torch.tanh(x @ self.to_pupil), torch.tanh(x @ self.to_gaze) * 3000

    def step(self):
        x, pupil, gaze = self.sample()
        with torch.autocast("cpu", dtype=torch.float16):
            p, g = self.net(x)
        pupil_loss = F.mse_loss(p.float(), pupil)
        gaze_loss = F.l1_loss(g.float(), gaze)
        self.optimizer.zero_grad()
        self.scaler.scale(1e-5 * pupil_loss + gaze_loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return pupil_loss.item(), gaze_loss.item()

    def fit(self, steps=80):
        for i in range(steps):
            pupil, gaze = self.step()
            if i % 5 == 4:
                print(f"{i + 1:3d} scale {self.scaler.get_scale():g} gaze {gaze:.1f} px pupil loss {pupil:.4f}")


Trainer().fit()
