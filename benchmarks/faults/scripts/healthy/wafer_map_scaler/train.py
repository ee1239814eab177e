"""Patterns on wafer maps in mixed precision; the loss scale begins high and finds its level by itself."""

import dataclasses

import torch
from engine import train_one_epoch
from model import WaferNet


@dataclasses.dataclass
class Config:
    epochs: int = 8
    batches: int = 40
    batch_size: int = 32
    lr: float = 1e-3
    init_scale: float = 2.0**22


def maps(n, g, shapes):
    kind = torch.randint(0, len(shapes), (n,), generator=g)
    turn = torch.randint(0, 16, (n,), generator=g)
    wafer = torch.stack([shapes[k].roll(int(t), 1) for k, t in zip(kind, turn)])
    return (wafer + 0.8 * torch.randn(wafer.shape, generator=g)).flatten(1), kind


if __name__ == "__main__":
    cfg = Config()
    torch.manual_seed(171)
    g = torch.Generator().manual_seed(172)
    shapes = torch.randn(6, 10, 16, generator=g)
    model = WaferNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.epochs * cfg.batches // 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=cfg.init_scale, growth_interval=60)
    for epoch in range(cfg.epochs):
        batches = [maps(cfg.batch_size, g, shapes) for _ in range(cfg.batches)]
        losses = train_one_epoch(model, batches, optimizer, scheduler, scaler)
        for i in range(0, len(losses), 10):
            print(f"epoch {epoch} loss {sum(losses[i : i + 10]) / 10:.4f} scale {scaler.get_scale():.0f}")
