"""Two hours of air pressure from the last eight."""

import dataclasses

import torch
from data import Barograms
from model import PressureForecaster


@dataclasses.dataclass
class Settings:
    steps: int = 400
    batch: int = 64
    lr: float = 1e-3
    beta: float = 0.5
    unit: float = 5.0  # pascal


if __name__ == "__main__":
    s = Settings()
    torch.manual_seed(121)
    barograms = Barograms(seed=122)
    model = PressureForecaster()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, s.lr, total_steps=s.steps)
    for step in range(s.steps):
        past, future = barograms.batch(s.batch)
        loss = torch.nn.functional.smooth_l1_loss(model(past) / s.unit, future / s.unit, beta=s.beta)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")
