"""The last epoch of a fine-tuning in FP32 at a learning rate of 1e-6: every step is tiny, and every one arrives."""

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.features(x))


def patients(n):
    x = torch.randn(n, 20)
    return x, (x[:, :3] + 0.5 * torch.randn(n, 3)).argmax(1)


torch.manual_seed(0)
model = Classifier()
for rate, steps in ((3e-3, 60), (1e-6, 60)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        x, y = patients(128)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"lr {rate}: step {step}: loss {loss.item():.4f}")
