"""Weight decay pulls the weights in front of a batch norm down while their direction is learnt: gradients grow as they shrink."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(3237)
model = nn.Sequential(
    nn.Linear(12, 48, bias=False),
    nn.BatchNorm1d(48),
    nn.ReLU(),
    nn.Linear(48, 48, bias=False),
    nn.BatchNorm1d(48),
    nn.ReLU(),
    nn.Linear(48, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=2e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
centres = torch.randn(4, 3, 12)
for step in range(80):
    y = torch.randint(0, 4, (64,))
    x = centres[y, torch.randint(0, 3, (64,))] + 0.6 * torch.randn(64, 12)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 8 == 0:
        print(f"step {step} weights {model[0].weight.norm().item():.2f} loss {loss.item():.4f}")
