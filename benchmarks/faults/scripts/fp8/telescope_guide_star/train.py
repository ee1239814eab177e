"""Offset and flux of a guide star from its stamp, with eight-bit layers for the mount's controller."""

import torch
import torch.nn.functional as F
from fp8 import Fp8Linear, calibrate
from stars import stamps
from torch import nn


class GuideNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = Fp8Linear(144, width), Fp8Linear(width, width), Fp8Linear(width, width)
        self.out = nn.Linear(width, 3)

    def forward(self, stamp):
        h = F.gelu(self.fc1(stamp))
        h = F.gelu(self.fc2(h))
        h = h + F.gelu(self.fc3(h))
        return self.out(h)


class Trainer:
    def __init__(self, steps=300, lr=2e-3):
        torch.manual_seed(81)
        self.g = torch.Generator().manual_seed(82)
        self.net, self.steps = GuideNet(), steps
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, weight_decay=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps, eta_min=1e-5)
        night, _ = stamps(256, self.g, flux=(0.1, 0.3))  # frames of a clear night without the moon
        calibrate(self.net, night)

    def fit(self):
        for step in range(self.steps):
            stamp, target = stamps(64, self.g)
            loss = F.smooth_l1_loss(self.net(stamp), target, beta=0.1)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            if step % 10 == 0:
                print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    trainer = Trainer()
    trainer.fit()
