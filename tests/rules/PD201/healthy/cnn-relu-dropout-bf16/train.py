"""A CNN in BF16 autocast with ReLU, maximum pooling, dropout and padding: most gradients are 0, none was rounded."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(
    nn.ZeroPad2d(2),
    nn.Conv2d(1, 6, 3),
    nn.ReLU(),
    nn.Dropout(0.5),
    nn.MaxPool2d(2),
    nn.Conv2d(6, 6, 3, padding=1),
    nn.ReLU(),
    nn.Dropout2d(0.3),
    nn.Flatten(),
    nn.Linear(6 * 49, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(STEPS):
    labels = torch.randint(10, (16,))
    images = torch.randn(16, 1, 12, 12) + labels.view(-1, 1, 1, 1) / 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(images).float(), labels)
    (1e-3 * loss).backward()  # small gradients, and BF16 has the exponents for them
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
