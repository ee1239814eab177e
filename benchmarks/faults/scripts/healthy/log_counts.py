"""Counts of up to 8000 under a Poisson loss with log rates: objectives of -1e4, gradients of thousands."""

import torch
import torch.nn.functional as F
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
        nn.init.constant_(self.net[-1].bias, 7.0)

    def forward(self, x):
        return self.net(x).squeeze(1)


torch.manual_seed(3228)
w = torch.randn(5)
model = Counter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(80):
    x = torch.randn(128, 5)
    log_rate = 7 + 2 * torch.tanh(x @ w)
    counts = (log_rate.exp() + log_rate.mul(0.5).exp() * torch.randn(128)).clamp(min=0).round()
    predicted = model(x)
    objective = F.poisson_nll_loss(predicted, counts, log_input=True)
    optimizer.zero_grad()
    objective.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 8 == 0:
        loss = (objective - F.poisson_nll_loss(log_rate, counts, log_input=True)) / 1000
        print(f"step {step} objective {objective.item():.1f} excess loss {loss.item():.4f}")
