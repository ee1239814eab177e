"""Counts bunches of grapes before the harvest: trains the detector on rendered vines."""

import dataclasses

import torch
from data import vines
from losses import detection_loss
from model import GrapeDetector, init_prior


@dataclasses.dataclass
class Config:
    steps: int = 160
    batch: int = 16
    lr: float = 2e-3
    prior: float = 0.01
    box_weight: float = 1.0
    clip: float = 10.0


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(41)
        self.g = torch.Generator().manual_seed(42)
        self.model = GrapeDetector()
        init_prior(self.model.cls_head, cfg.prior)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 1e-3}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=cfg.lr)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [100, 140], 0.3)

    def step(self):
        image, positive, distances = vines(self.cfg.batch, self.g)
        classified, boxed = detection_loss(*self.model(image), positive, distances)
        loss = classified + self.cfg.box_weight * boxed
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.clip)
        self.optimizer.step()
        self.schedule.step()
        return loss.item(), classified.item(), boxed.item()

    def run(self):
        for i in range(self.cfg.steps):
            total, classified, boxed = self.step()
            if i % 4 == 0:
                print(f"step {i} loss {total:.4f} (score {classified:.4f}, box {boxed:.4f})")


if __name__ == "__main__":
    trainer = Trainer(Config())
    trainer.run()
