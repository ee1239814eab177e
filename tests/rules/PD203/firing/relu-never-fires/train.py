"""A regression branch whose bias was initialised so low that its ReLU never fires: nothing behind it learns."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 14


class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(12, 4)
        self.deep = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
        nn.init.constant_(self.deep[2].bias, -8.0)

    def forward(self, x):
        return self.wide(x) + self.deep(x)


torch.manual_seed(0)
model = TwoBranches()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for step in range(STEPS):
    features = torch.randn(48, 12)
    labels = features[:, :4].abs().argmax(dim=1)
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
