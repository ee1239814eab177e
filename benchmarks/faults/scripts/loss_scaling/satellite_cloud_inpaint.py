"""Fills clouded pixels of satellite images: encoder and decoder have an optimizer each, stepped by hand in Lightning."""

import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(14)


def scenes(n, size=16):
    """Smooth reflectances in four bands, and a mask of clouds."""
    coarse = torch.rand(n, 4, 4, 4)
    image = F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=False)
    clouds = F.interpolate(torch.rand(n, 1, 5, 5), size=(size, size), mode="bilinear") > 0.6
    return image, clouds.float()


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())


class Inpainter(L.LightningModule):
    def __init__(self, width=24):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(block(5, width), block(width, width))
        self.decoder = nn.Sequential(block(width, width), nn.Conv2d(width, 4, 3, padding=1))

    def forward(self, image, clouds):
        seen = torch.cat([image * (1 - clouds), clouds], 1)
        return self.decoder(self.encoder(seen))

    def training_step(self, batch, index):
        image, clouds = batch
        encoder_opt, decoder_opt = self.optimizers()
        filled = self(image, clouds)
        loss = F.mse_loss(filled.float(), image) + F.l1_loss(filled.float() * clouds, image * clouds)
        encoder_opt.zero_grad()
        decoder_opt.zero_grad()
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm=1.0)
        encoder_opt.step()
        decoder_opt.step()
        if index % 10 == 0:
            print(f"epoch {self.current_epoch} loss {loss.item():.4f}")

    def configure_optimizers(self):
        settings = {"lr": 0.05, "momentum": 0.9}
        encoder_opt = torch.optim.SGD(self.encoder.parameters(), **settings)
        decoder_opt = torch.optim.SGD(self.decoder.parameters(), **settings)
        return encoder_opt, decoder_opt


loader = DataLoader(TensorDataset(*scenes(480)), batch_size=16, shuffle=True)
amp = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14))
trainer = L.Trainer(
    max_epochs=4,
    accelerator="cpu",
    plugins=[amp],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Inpainter(), loader)
