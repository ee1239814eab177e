"""An Elman network on long sequences, its learning rate raised in the middle, and nothing that clips."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 32


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 16, nonlinearity="relu", batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1]).squeeze(-1)


torch.manual_seed(0)
model = Adding()
optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
for step in range(STEPS):
    if step == 24:
        optimizer.param_groups[0]["lr"] = 0.6
    x = torch.rand(32, 24, 2)
    loss = F.mse_loss(model(x), x[:, :, 0].mean(1) + x[:, 0, 1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4g}")
