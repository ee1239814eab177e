"""Bats by their calls: a frozen trunk with batch norms in eval mode, a new head, a rate that ends at exactly zero."""

import torch
import torch.nn.functional as F
from torch import nn


class CallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv1d(1, 24, 7, stride=2),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Conv1d(24, 48, 5, stride=2),
            nn.BatchNorm1d(48),
            nn.ReLU(),
        )
        self.head = nn.Linear(48, 6)

    def train(self, mode=True):
        super().train(mode)
        self.trunk.eval()
        return self

    def forward(self, call):
        with torch.no_grad():
            h = self.trunk(call).amax(-1)
        return self.head(h)


def calls(n):
    t = torch.linspace(0, 1, 64)
    kind = torch.randint(6, (n,))
    pitch = 10 + 9.0 * kind[:, None]
    return (torch.sin(pitch * t + 6 * torch.rand(n, 1)) + 0.15 * torch.randn(n, 64)).unsqueeze(1), kind


torch.manual_seed(108)
model = CallNet().train()
for p in model.trunk.parameters():
    p.requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.0)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
for step in range(160):
    call, kind = calls(64)
    loss = F.cross_entropy(model(call), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step < 150:
        scheduler.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f} rate {optimizer.param_groups[0]['lr']:.5f}")
