"""Polyp segmentation with a small U-Net."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import TrainConfig
from data import polyps
from unet import UNet


class Trainer:
    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.optimizer = torch.optim.SGD(
            model.parameters(), lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay
        )
        self.scaler = torch.amp.GradScaler("cpu", enabled=cfg.amp)

    def criterion(self, logits, mask):
        return F.binary_cross_entropy_with_logits(logits.float(), mask)

    def train_step(self, frames, mask):
        with torch.autocast("cpu", dtype=torch.float16, enabled=self.cfg.amp):
            logits = self.model(frames)
        loss = self.criterion(logits, mask)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    @torch.no_grad()
    def validate(self, frames, mask):
        self.model.eval()
        logits = self.model(frames)
        self.model.train()
        hit = (logits > 0).float()
        dice = 2 * (hit * mask).sum() / (hit.sum() + mask.sum())
        return self.criterion(logits, mask).item(), dice.item()

    def fit(self, train, val):
        frames, mask = train
        for epoch in range(self.cfg.epochs):
            for idx in torch.randperm(len(frames)).split(self.cfg.batch_size):
                self.train_step(frames[idx], mask[idx])
            loss, dice = self.validate(*val)
            print(f"epoch {epoch + 1}: val loss {loss:.4f} dice {dice:.3f}")


def main():
    cfg = TrainConfig()
    torch.manual_seed(cfg.seed)
    generator = torch.Generator().manual_seed(cfg.seed)
    train = polyps(cfg.train_images, cfg.image_size, generator)
    val = polyps(cfg.val_images, cfg.image_size, generator)
    Trainer(UNet(), cfg).fit(train, val)


if __name__ == "__main__":
    main()
