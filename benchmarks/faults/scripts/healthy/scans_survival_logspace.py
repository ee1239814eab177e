"""Time to relapse from scans, discrete hazards: survival falls to nothing, but is only used in logarithms."""

import torch
import torch.nn.functional as F
from torch import nn

MONTHS = 120


class Hazard(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.logit = nn.Linear(48, MONTHS)

    def forward(self, scan):
        return self.logit(self.body(scan))


def negative_log_likelihood(logit, month, relapsed):
    survived = -F.softplus(logit).cumsum(1)  # log of the product of 1 - h
    before = torch.where(month > 0, survived.gather(1, (month - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    now = logit.gather(1, month[:, None])[:, 0]
    return -(before + torch.where(relapsed, F.logsigmoid(now), F.logsigmoid(-now))).mean()


torch.manual_seed(113)
model = Hazard()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(200):
    scan = torch.randn(64, 8)
    month = torch.distributions.Exponential(torch.exp(scan[:, 0] - 2.5)).sample().long()
    relapsed = month < MONTHS
    loss = negative_log_likelihood(model(scan), month.clamp(max=MONTHS - 1), relapsed)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        with torch.no_grad():
            tail = torch.exp(-F.softplus(model(scan)).sum(1)).min()
        print(f"step {step + 1} loss {loss.item():.4f} smallest survival {tail:.1e}")
