"""Bike docks: AdamW over the winter's data, then a second phase with group-wise rates over spring and summer."""

import torch
import torch.nn as nn

from data import batch
from model import DockNet


class Trainer:
    def __init__(self, model):
        self.model = model
        self.step = 0

    def fit(self, optimizer, steps, season, log_every=10):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=3e-4)
        for i in range(steps):
            *inputs, y = batch(48, season(i / steps))
            loss = nn.functional.smooth_l1_loss(self.model(*inputs), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            self.step += 1
            if self.step % log_every == 0:
                print(f"[{self.step:4d}] loss {loss.item():.4f}")


torch.manual_seed(21)
model = DockNet()
trainer = Trainer(model)
trainer.fit(torch.optim.AdamW(model.parameters(), lr=3e-3), 180, season=lambda f: 0.0)

# summer: the embeddings move slowly, the rest at the usual rate
groups = [
    {"params": model.dock.parameters(), "lr": 3e-4},
    {"params": [*model.history.parameters(), *model.head.parameters()], "lr": 2e-3},
]
trainer.fit(torch.optim.AdamW(groups, lr=1e-3), 320, season=lambda f: min(1.0, 2 * f))
