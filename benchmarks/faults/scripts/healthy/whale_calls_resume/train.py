"""Whale calls: trains in two sessions, the second of which resumes from the checkpoint of the first."""

import io
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data import calls
from model import CallNet


@dataclass
class Config:
    epochs: int = 10
    stop_after: int = 4
    batch_size: int = 64
    lr: float = 0.1
    seed: int = 45


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        generator = torch.Generator().manual_seed(cfg.seed)
        self.train, self.val = calls(1024, generator), calls(256, generator)
        self.model = CallNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True)
        total = cfg.epochs * (1024 // cfg.batch_size)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=cfg.lr, total_steps=total + 1)
        self.epoch = 0

    def state(self):
        parts = ("model", "optimizer", "scheduler")
        return {"epoch": self.epoch, **{k: getattr(self, k).state_dict() for k in parts}}

    def load(self, file):
        state = torch.load(file)
        self.epoch = state.pop("epoch")
        for k, v in state.items():
            getattr(self, k).load_state_dict(v)

    def run(self, until):
        x, y = self.train
        while self.epoch < until:
            self.model.train()
            for idx in torch.randperm(len(x)).split(self.cfg.batch_size):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x[idx]), y[idx]).backward()
                self.optimizer.step()
                self.scheduler.step()
            self.epoch += 1
            print(f"epoch {self.epoch} val loss {self.validate():.4f} lr {self.scheduler.get_last_lr()[0]:.2e}")

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        return F.cross_entropy(self.model(self.val[0]), self.val[1]).item()


cfg = Config()
torch.manual_seed(cfg.seed)
first = Trainer(cfg)
first.run(cfg.stop_after)
file = io.BytesIO()
torch.save(first.state(), file)
file.seek(0)

second = Trainer(cfg)
second.load(file)
second.run(cfg.epochs)
