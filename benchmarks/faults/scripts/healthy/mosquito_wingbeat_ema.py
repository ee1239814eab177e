"""Recognises mosquito species by wingbeat: a frozen filter bank, a trained head, and averaged weights in Lightning."""

import math
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(44)
SPECIES, RATE, LENGTH = 5, 2000, 160


def recordings(n):
    """A few harmonics of the species' wingbeat in noise."""
    y = torch.randint(SPECIES, (n,))
    base = 320 + 75 * y[:, None] + 28 * torch.randn(n, 1)
    t = torch.arange(LENGTH) / RATE
    phase = 2 * math.pi * torch.rand(n, 1)
    x = torch.sin(2 * math.pi * base * t + phase) + 0.5 * torch.sin(4 * math.pi * base * t)
    return TensorDataset(x + 1.2 * torch.randn(n, LENGTH), y)


class Wingbeat(nn.Module):
    def __init__(self, filters=32):
        super().__init__()
        self.bank = nn.Conv1d(1, 2 * filters, 64, stride=16, bias=False)
        t = torch.arange(64) / RATE
        centres = torch.linspace(220, 780, filters)[:, None]
        waves = torch.cat([torch.sin(2 * math.pi * centres * t), torch.cos(2 * math.pi * centres * t)])
        self.bank.weight.data = (waves * torch.hann_window(64))[:, None]
        self.bank.requires_grad_(False)
        self.norm = nn.BatchNorm1d(filters)
        self.classify = nn.Sequential(nn.Linear(filters, 48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, SPECIES))

    def forward(self, x):
        a, b = self.bank(x[:, None]).chunk(2, 1)
        power = (a.square() + b.square()).mean(-1)
        return self.classify(self.norm(torch.log(power + 1e-3)))


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Wingbeat()
        self.held_out = []

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y, label_smoothing=0.05)

    def validation_step(self, batch, index):
        self.held_out.append(F.cross_entropy(self.net(batch[0]).float(), batch[1]).item())

    def on_validation_epoch_end(self):
        print(f"epoch {self.current_epoch} validation loss {sum(self.held_out) / len(self.held_out):.4f}")
        self.held_out.clear()

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.02)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, 1.0, total_iters=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


trainer = L.Trainer(
    max_epochs=10,
    accelerator="cpu",
    precision="bf16-mixed",
    callbacks=[EMAWeightAveraging(decay=0.98)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
trainer.fit(
    Classifier(),
    DataLoader(recordings(1024), batch_size=32, shuffle=True),
    DataLoader(recordings(512), batch_size=256),
)
