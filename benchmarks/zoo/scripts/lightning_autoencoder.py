"""Lightning: an autoencoder under the Trainer, BF16 mixed, with accumulation and clipping.

library: lightning
"""

import logging

import _torchvision  # noqa: F401
import lightning as L
import torch
import torch.nn.functional as F
from _digest import finish
from torch import nn

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Autoencoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))
        self.losses = []

    def training_step(self, batch, _):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        (x,) = batch
        self.log("loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)]


L.seed_everything(0, verbose=False)
codes = torch.randn(512, 4)
data = torch.utils.data.TensorDataset(torch.tanh(codes @ torch.randn(4, 64)))
train = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
held_out = torch.utils.data.DataLoader(data, batch_size=128)
model = Autoencoder()
trainer = L.Trainer(
    max_epochs=6,
    accelerator="cpu",
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, train, held_out)
finish(model.losses, model)
