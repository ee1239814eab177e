"""A temperature that is learnt fast and bounded by nothing multiplies cosines, under BF16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 24


class Cosines(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(6, 12))
        self.log_temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        cosines = F.normalize(x, dim=-1) @ F.normalize(self.centres, dim=-1).T
        return self.log_temperature.exp() * cosines


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 12), Cosines()

    def forward(self, x):
        return self.head(self.body(x))


torch.manual_seed(0)
model, centres = Classifier(), torch.randn(6, 12)
fast = {"params": [model.head.log_temperature], "lr": 0.35}
optimizer = torch.optim.Adam([{"params": [*model.body.parameters(), model.head.centres]}, fast], lr=2e-2)
for step in range(STEPS):
    y = torch.randint(6, (32,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(centres[y] + 0.1 * torch.randn(32, 12))
    loss = F.cross_entropy(logits.float(), y) - model.head.log_temperature
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
