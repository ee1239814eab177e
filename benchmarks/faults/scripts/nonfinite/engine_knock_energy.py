"""Detects knocking combustion from block vibration; trained in half precision with Lightning."""

import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(2)


def cycles(n, length=128):
    """Accelerometer windows in m/s^2; a knocking cycle rings at about 7 kHz."""
    t = torch.arange(length) / length
    knocks = torch.rand(n) < 0.4
    load = torch.empty(n, 1).log_normal_(2.3, 0.55)
    ring = torch.sin(2 * torch.pi * 14 * t + 6.28 * torch.rand(n, 1)) * torch.exp(-4 * t)
    x = load * (0.6 * torch.randn(n, length) + 1.6 * ring * knocks[:, None])
    return x, knocks.float()


class BandEnergy(nn.Module):
    """Learned band-pass filters and the log energy in each band."""

    def __init__(self, bands=12, taps=25):
        super().__init__()
        self.filters = nn.Conv1d(1, bands, taps, padding=taps // 2, bias=False)

    def forward(self, x):
        y = self.filters(x[:, None])
        energy = y.square().sum(-1)
        return torch.log(energy + 1e-3)


class KnockNet(nn.Module):
    def __init__(self, bands=12):
        super().__init__()
        self.frontend = BandEnergy(bands)
        self.norm = nn.LayerNorm(bands)
        self.classify = nn.Sequential(nn.Linear(bands, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.classify(self.norm(self.frontend(x)))[:, 0]


class Detector(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = KnockNet()

    def training_step(self, batch, index):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self.net(x).float(), y.float())
        if index % 16 == 0:
            print(f"epoch {self.current_epoch} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    loader = DataLoader(TensorDataset(*cycles(1536)), batch_size=48, shuffle=True)
    trainer = L.Trainer(
        max_epochs=5,
        accelerator="cpu",
        precision="16-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Detector(), loader)
