"""Estimates the sway of a crane's load from its drives; the averaged weights are the ones that are validated."""

import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(6)


def hoists(n, length=24):
    """Trolley acceleration and cable length; the sway follows as a damped pendulum."""
    cable = torch.empty(n).uniform_(8, 30)
    push = F.avg_pool1d(torch.randn(n, 1, length + 4), 5, stride=1)[:, 0] * 3
    angle, rate = torch.zeros(n), torch.zeros(n)
    for i in range(length):
        rate = 0.97 * rate - 0.5 * (9.81 * angle + push[:, i]) / cable
        angle = angle + 0.5 * rate
    x = torch.cat([push, (cable[:, None] - 19) / 6], 1)
    return TensorDataset(x, 8 * angle)


class Sway(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(25, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, 1),
        )
        self.held_out = []

    def training_step(self, batch, index):
        x, y = batch
        return F.smooth_l1_loss(self.net(x)[:, 0].float(), y.float())

    def validation_step(self, batch, index):
        x, y = batch
        self.held_out.append(F.smooth_l1_loss(self.net(x)[:, 0].float(), y.float()).item())

    def on_validation_epoch_end(self):
        print(f"epoch {self.current_epoch} validation loss {sum(self.held_out) / len(self.held_out):.4f}")
        self.held_out.clear()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)


model = Sway().to(torch.bfloat16)
before = [p.detach().float() for p in model.parameters()]
trainer = L.Trainer(
    max_epochs=12,
    accelerator="cpu",
    precision="bf16-true",
    gradient_clip_val=1.0,
    callbacks=[EMAWeightAveraging(decay=0.998)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
trainer.fit(
    model,
    DataLoader(hoists(2048), batch_size=64, shuffle=True),
    DataLoader(hoists(512), batch_size=256),
)
