"""An FP16 network with FP32 masters and a dynamic loss scale, all of it by hand; the first steps overflow."""

import torch
import torch.nn.functional as F
from torch import nn


class DynamicScale:
    def __init__(self, start=2.0**20, patience=50):
        self.value, self.patience, self.good = start, patience, 0

    def update(self, finite):
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value /= 4
        elif self.good % self.patience == 0:
            self.value *= 2


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(12, 64), nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.stem(x))))


torch.manual_seed(3203)
centres = torch.randn(4, 3, 12)
model = Classifier().half()
masters = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=5e-3)
scale = DynamicScale()
for step in range(70):
    y = torch.randint(0, 4, (64,))
    x = centres[y, torch.randint(0, 3, (64,))] + 0.5 * torch.randn(64, 12)
    loss = F.cross_entropy(model(x.half()).float(), y)
    model.zero_grad()
    (scale.value * loss).backward()
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    if finite:
        for master, p in zip(masters, model.parameters()):
            master.grad = p.grad.float() / scale.value
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters()):
                p.copy_(master)
    scale.update(finite)
    if step % 6 == 0:
        print(f"step {step} scale {scale.value:g} loss {loss.item():.4f}")
