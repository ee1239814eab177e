"""Grades tea leaves with a small mixer. Sized for the box in the withering shed: weights take two bytes each."""

import dataclasses

import torch
from data import loaders
from engine import evaluate, train_one_epoch
from model import LeafMixer


@dataclasses.dataclass
class Config:
    epochs: int = 18
    batch_size: int = 64
    lr: float = 1e-4
    weight_decay: float = 0.05
    clip: float = 1.0
    smoothing: float = 0.05
    warmup: int = 20
    param_dtype: torch.dtype = torch.bfloat16


if __name__ == "__main__":
    cfg = Config()
    torch.manual_seed(0)
    train_loader, test_loader = loaders(cfg.batch_size)
    model = LeafMixer().to(cfg.param_dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    total = cfg.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / cfg.warmup) * (1.0 - 0.9 * i / total)
    )
    for epoch in range(cfg.epochs):
        train_loss = train_one_epoch(model, train_loader, optimizer, scheduler, cfg)
        print(f"epoch {epoch} loss {train_loss:.4f} accuracy {evaluate(model, test_loader, cfg):.3f}")
