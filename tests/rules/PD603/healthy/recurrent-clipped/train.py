"""The same network, clipped, with one batch a hundred times too large and a loss that comes down all the same."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 32


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 16, nonlinearity="tanh", batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(-1)


torch.manual_seed(0)
model = Adding()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(STEPS):
    x = torch.rand(32, 24, 2)
    target = x[:, :, 0].mean(1) + x[:, 0, 1]
    loss = F.mse_loss(model(x), target * (40.0 if step == 20 else 1.0))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4g}")
