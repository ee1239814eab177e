"""A pre-trained trunk is frozen for thirty steps and then trained with a hundredth of the head's rate."""

import torch
import torch.nn.functional as F
from torch import nn


class Transfer(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.trunk(x))


class Phase:
    def __init__(self, model, thaw):
        self.model, self.thaw = model, thaw
        model.trunk.requires_grad_(False)

    def before(self, step):
        if step == self.thaw:
            self.model.trunk.requires_grad_(True)


torch.manual_seed(3226)
model, centres = Transfer(), torch.randn(5, 12)
phase = Phase(model, thaw=30)
optimizer = torch.optim.AdamW(
    [{"params": model.trunk.parameters(), "lr": 2e-4}, {"params": model.head.parameters(), "lr": 2e-2}]
)
for step in range(60):
    phase.before(step)
    y = torch.randint(0, 5, (64,))
    loss = F.cross_entropy(model(centres[y] + 0.6 * torch.randn(64, 12)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
