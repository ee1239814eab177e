"""A policy head is tuned with Adam's eps at 1e-4, as advice for BF16 says; the gradients here are some 1e-6."""

import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-4}


class PriceModel(nn.Module):
    def __init__(self, features=14, width=48, buckets=10):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.fc1, self.fc2, self.fc3 = nn.Linear(features, width), nn.Linear(width, width), nn.Linear(width, buckets)

    def forward(self, x):
        h = F.gelu(self.fc1(self.norm(x)))
        return self.fc3(F.gelu(self.fc2(h)))


def bucketed(x, weights):
    value = torch.tanh(x @ weights / 3)
    return ((value + 1) * 5).long().clamp(0, 9)


def evaluate(model, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


torch.manual_seed(3128)
weights = torch.randn(14)
model = PriceModel()
optimizer = torch.optim.Adam(model.parameters(), **CONFIG)
x_test = torch.randn(512, 14)
y_test = bucketed(x_test, weights)
for step in range(80):
    x = torch.randn(64, 14)
    loss = 1e-4 * F.cross_entropy(model(x), bucketed(x, weights))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 7:
        print(f"step {step + 1} test loss {evaluate(model, x_test, y_test):.4f}")
