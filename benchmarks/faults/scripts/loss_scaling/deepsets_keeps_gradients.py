"""Deep sets in FP16 autocast; a step whose norm is not finite is left out, and so is the zero_grad that goes with it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SetNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.rho = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 2))

    def forward(self, points):
        h = self.phi(points)
        return self.rho(torch.cat([h.mean(1), h.amax(1)], -1))


class Trainer:
    def __init__(self, model, lr=2e-3):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=6)
        self.step = 0

    def training_step(self, points, target):
        with torch.autocast("cpu", dtype=torch.float16):
            out = self.model(points)
            loss = F.mse_loss(out.float(), target)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        if torch.isfinite(norm):
            self.scaler.step(self.optimizer)
            self.optimizer.zero_grad()
        self.scaler.update()
        if self.step % 3 == 0:
            print(f"step {self.step} loss {loss.item():.4f} scale {self.scaler.get_scale():g}")
        self.step += 1

    def fit(self, loader, epochs):
        for _ in range(epochs):
            for points, target in loader:
                self.training_step(points, target)


torch.manual_seed(404)
points = torch.randn(640, 20, 3) * torch.rand(640, 1, 3).add(0.3)
target = torch.stack([points.square().sum(-1).mean(1), points.prod(-1).amax(1)], 1)
trainer = Trainer(SetNet())
trainer.fit(DataLoader(TensorDataset(points, target), batch_size=32, shuffle=True), epochs=6)
