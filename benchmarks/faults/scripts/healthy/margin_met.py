"""A hinge loss that most of the batch has met after a while: then most gradients are exactly zero, and rightly so."""

import torch
from torch import nn


class SVMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.score = nn.Sequential(nn.Linear(10, 32), nn.ReLU()), nn.Linear(32, 4)

    def forward(self, x):
        return self.score(self.body(x))


torch.manual_seed(3227)
model, centres = SVMHead(), 2.0 * torch.randn(4, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.MultiMarginLoss()
for step in range(60):
    y = torch.randint(0, 4, (64,))
    loss = criterion(model(centres[y] + 0.8 * torch.randn(64, 10)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
