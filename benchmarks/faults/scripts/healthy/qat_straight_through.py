"""Four-bit weights and eight-bit activations with straight-through estimators; steps are learnt, slowly, as LSQ does."""

import torch
import torch.nn.functional as F
from torch import nn


def round_through(x):
    return x + (x.round() - x).detach()


class LSQ(nn.Module):
    def __init__(self, start, low, high):
        super().__init__()
        self.step, self.low, self.high = nn.Parameter(torch.tensor(start)), low, high

    def forward(self, x):
        g = (x.numel() * self.high) ** -0.5
        s = self.step * g + (self.step - self.step * g).detach()
        return round_through((x / s).clamp(self.low, self.high)) * s


class QLinear(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.wq, self.aq = LSQ(0.05, -8, 7), LSQ(0.05, -128, 127)

    def forward(self, x):
        return F.linear(self.aq(x), self.wq(self.weight), self.bias)


torch.manual_seed(3213)
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), QLinear(40, 40), nn.ReLU(), QLinear(40, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
centres = torch.randn(4, 10)
for step in range(60):
    y = torch.randint(0, 4, (64,))
    loss = F.cross_entropy(model(centres[y] + 0.8 * torch.randn(64, 10)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
