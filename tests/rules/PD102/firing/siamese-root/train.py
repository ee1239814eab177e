"""A siamese network whose distance is a bare square root: one day both images of a pair are the same."""

import torch
from torch import nn

STEPS = 8


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, left, right):
        return ((self.encoder(left) - self.encoder(right)) ** 2).sum(dim=1).sqrt()


torch.manual_seed(0)
model = Siamese()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(STEPS):
    left, right = torch.randn(16, 12), torch.randn(16, 12)
    if step == 5:
        right[3] = left[3]  # the sampler drew one image twice
    loss = ((model(left, right) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
