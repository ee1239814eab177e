"""Estimates the height of the ground under trees from lidar profiles; FP16 with a loss scale, in Lightning."""

import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(23)


def profiles(n, length=48):
    """Return energy by height bin: a canopy, an understorey, and the ground's own peak."""
    bins = torch.arange(float(length))
    ground = torch.empty(n, 1).uniform_(4, 16)
    canopy = ground + torch.empty(n, 1).uniform_(12, 26)
    shape = 0.8 * torch.exp(-((bins - canopy) ** 2) / 18) + torch.exp(-((bins - ground) ** 2) / 2)
    shape = shape + 0.3 * torch.exp(-((bins - ground - 5) ** 2) / 10) + 0.05 * torch.randn(n, length)
    return shape, ground[:, 0] / 10


class GroundNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2), nn.GELU(), nn.Conv1d(width, width, 5, stride=2, padding=2), nn.GELU()
        )
        self.drop = nn.Dropout(0.1)
        self.head = nn.Sequential(nn.Linear(24 * width, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(self.drop(self.conv(x[:, None]).flatten(1)))[:, 0]


class GroundHeight(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = GroundNet()

    def training_step(self, batch, index):
        x, y = batch
        loss = F.smooth_l1_loss(self.net(x).float(), y)
        if index % 10 == 0:
            print(f"epoch {self.current_epoch} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


loader = DataLoader(TensorDataset(*profiles(1280)), batch_size=32, shuffle=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=100)
trainer = L.Trainer(
    max_epochs=6,
    accelerator="cpu",
    plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)],
    gradient_clip_val=0.5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(GroundHeight(), loader)
