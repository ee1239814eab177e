"""A CNN seeded with care: only deterministic algorithms, none chosen by timing."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False

model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    images, labels = torch.randn(32, 1, 12, 12), torch.randint(4, (32,))
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
