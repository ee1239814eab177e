"""Diffusion on latents: bfloat16 network, float32 master weights, EMA weights for sampling."""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data import latents
from model import Denoiser, EMA


@dataclass
class Config:
    steps: int = 400
    batch: int = 128
    lr: float = 2e-3
    ema_decay: float = 0.996
    seed: int = 3


def noised(x, t, noise):
    a = torch.cos(t * torch.pi / 2)[:, None]
    return a * x + (1 - a**2).sqrt() * noise


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.generator = torch.Generator().manual_seed(cfg.seed)
        self.data = latents(4096, self.generator)
        self.val = latents(512, self.generator)
        self.model = Denoiser().to(torch.bfloat16)
        self.master = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.ema = EMA(self.model, cfg.ema_decay)
        self.optimizer = torch.optim.Adam(self.master, lr=cfg.lr)

    def objective(self, model, x, generator=None):
        t = torch.rand(len(x), generator=generator) * 0.98 + 0.01
        noise = torch.randn(x.shape, generator=generator)
        return F.mse_loss(model(noised(x, t, noise), t), noise)

    def step(self):
        idx = torch.randint(len(self.data), (self.cfg.batch,), generator=self.generator)
        loss = self.objective(self.model, self.data[idx])
        self.model.zero_grad()
        loss.backward()
        for m, p in zip(self.master, self.model.parameters()):
            m.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.model.parameters()):
                p.copy_(m)
        self.ema.update(self.master)
        return loss.item()

    @torch.no_grad()
    def validate(self):
        net = copy.deepcopy(self.model)
        self.ema.copy_to(net)
        generator = torch.Generator().manual_seed(0)
        return self.objective(net, self.val, generator).item()

    def run(self):
        for step in range(1, self.cfg.steps + 1):
            train = self.step()
            if step % 20 == 0:
                print(f"step {step} train {train:.4f} ema val loss {self.validate():.4f}")


if __name__ == "__main__":
    cfg = Config()
    torch.manual_seed(cfg.seed)
    trainer = Trainer(cfg)
    trainer.run()
