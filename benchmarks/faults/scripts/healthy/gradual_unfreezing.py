"""Fine-tuning in stages, BF16 autocast: frozen layers, frozen norms, rates from 1e-7 upwards, a warm-up over half the run."""

import torch
import torch.nn.functional as F
from torch import nn


class Backbone(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(4, dim, 5, padding=2), nn.BatchNorm1d(dim)
        self.conv2, self.norm2 = nn.Conv1d(dim, dim, 5, padding=2), nn.BatchNorm1d(dim)
        self.conv3, self.norm3 = nn.Conv1d(dim, dim, 5, padding=2), nn.BatchNorm1d(dim)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool1d(F.relu(self.norm2(self.conv2(x))), 2)
        return F.relu(self.norm3(self.conv3(x))).mean(-1)


class Fine(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.eval()
        return self


torch.manual_seed(7)
model = Fine().train()
with torch.no_grad():
    for m in model.modules():
        if isinstance(m, nn.BatchNorm1d):
            m.running_var.fill_(0.1)
model.backbone.requires_grad_(False)
layers = [model.backbone.conv1, model.backbone.conv2, model.backbone.conv3, model.head]
optimizer = torch.optim.AdamW([{"params": m.parameters(), "lr": r} for m, r in zip(layers, (1e-7, 1e-6, 1e-5, 5e-3))])
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 80))
prototypes = torch.randn(5, 4, 24)
for step in range(160):
    if step == 60:
        model.backbone.conv3.requires_grad_(True)
    if step == 110:
        model.backbone.conv2.requires_grad_(True)
    y = torch.randint(5, (32,))
    x = prototypes[y] + 0.5 * torch.randn(32, 4, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    if step % 4 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
