"""Exact zeros among probabilities, a mean that may be over nothing and logits in the hundreds, each of them guarded."""

import torch
from torch import nn

STEPS = 8


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.gate = nn.Sequential(nn.Linear(16, 1), nn.Hardsigmoid())
        self.classes = nn.Linear(16, 5)

    def forward(self, features):
        x = self.body(features)
        return self.gate(x), 200 * self.classes(x)


torch.manual_seed(0)
model = Gates()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(STEPS):
    features = torch.randn(32, 6)
    features[:8] *= 64
    gate, logits = model(features)
    chosen = features[:, 0] > (0 if step % 2 else 1e6)  # none at all on every second step
    closed = -gate.clamp_min(1e-6).log().mean()
    classes = torch.logsumexp(logits, dim=1) - logits[:, 0]
    loss = closed + 1e-3 * (classes * chosen).sum() / chosen.sum().clamp_min(1)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
