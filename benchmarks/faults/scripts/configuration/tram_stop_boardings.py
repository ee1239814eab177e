"""Boardings at a tram stop by minute of the day, learned in bfloat16 with Lightning."""

import math
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(10)
DAY, PERIODS = 1440, (10, 24, 120, 1440)


def observations(n):
    """Two lines call every 10 and 24 minutes; more people travel in the morning and when it is dry."""
    minute = torch.randint(300, DAY, (n,))
    rain = torch.rand(n)
    rush = 1 + torch.exp(-(((minute - 480) / 70.0) ** 2))
    first = torch.cos(2 * math.pi * minute / 10).clamp(min=0)
    second = torch.cos(2 * math.pi * (minute - 5) / 24).clamp(min=0)
    people = rush * (1.4 * first + first * second + second) * (1.2 - 0.5 * rain)
    return minute, rain, people + 0.1 * torch.randn(n)


class Clock(nn.Module):
    """Sine and cosine of the time of day at the known periods."""

    def forward(self, minute):
        angle = 2 * math.pi * minute
        waves = [f(angle / period) for period in PERIODS for f in (torch.sin, torch.cos)]
        return torch.stack(waves, -1)


class BoardingNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.clock = Clock()
        self.body = nn.Sequential(
            nn.Linear(2 * len(PERIODS) + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, minute, rain):
        x = torch.cat([self.clock(minute), rain[:, None]], -1)
        return self.body(x.to(self.body[0].weight.dtype))[:, 0]


class Boardings(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = BoardingNet()

    def training_step(self, batch, index):
        minute, rain, people = batch
        loss = F.mse_loss(self.net(minute, rain).float(), people.float())
        if index % 16 == 0:
            print(f"epoch {self.current_epoch} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-3, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=self.trainer.max_epochs * 48)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


minutes, rain, people = observations(3072)
train = TensorDataset(minutes.float(), rain, people)
trainer = L.Trainer(
    max_epochs=7,
    accelerator="cpu",
    precision="bf16-true",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Boardings()
trainer.fit(model, DataLoader(train, batch_size=64, shuffle=True))
