"""Sixteen layers whose weights are four times as large as they should be: activations grow from layer to layer."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, DEPTH, WIDTH = 8, 16, 32


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=4.0 / WIDTH**0.5)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(F.layer_norm(x, (WIDTH,)))


torch.manual_seed(0)
model = Tower()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(STEPS):
    features = torch.randn(64, WIDTH)
    labels = features[:, :4].argmax(dim=1)
    loss = F.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
