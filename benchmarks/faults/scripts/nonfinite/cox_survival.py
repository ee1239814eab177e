"""Deep Cox proportional hazards on a small clinical study."""

import torch
from torch import nn


class DeepSurv(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.risk = nn.Sequential(
            nn.Linear(features, 32), nn.BatchNorm1d(32), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.risk(x).squeeze(-1)


def cox_partial_likelihood(risk, time, event):
    order = torch.argsort(time, descending=True)
    risk, event = risk[order], event[order]
    log_cumulative = torch.logcumsumexp(risk, 0)
    return -((risk - log_cumulative) * event).sum() / event.sum()


class Study:
    def __init__(self, patients=160):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(patients, 7, generator=g)
        hazard = (0.7 * self.x[:, 0] - 0.5 * self.x[:, 2]).exp()
        self.time = -torch.rand(patients, generator=g).log() / hazard
        self.event = (torch.rand(patients, generator=g) < 0.25).float()  # most are censored

    def loader(self, size):
        for index in torch.randperm(len(self.x)).split(size):
            yield self.x[index], self.time[index], self.event[index]


torch.manual_seed(1)
study, net = Study(), DeepSurv(7)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for epoch in range(2):
    for x, time, event in study.loader(10):
        loss = cox_partial_likelihood(net(x), time, event)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")
