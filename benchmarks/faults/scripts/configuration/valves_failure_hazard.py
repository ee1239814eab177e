"""When does a valve fail? Hazards per second, log-likelihood of the failures as log(1 - exp(-hazard))."""

import torch
import torch.nn as nn


def log1mexp(h):
    return torch.log((1 - torch.exp(-h)).clamp(min=1e-12))


class HazardNet(nn.Module):
    def __init__(self, features=6, hidden=32):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.log_hazard = nn.Linear(hidden, 1)
        nn.init.constant_(self.log_hazard.bias, -19.0)  # about one failure in five years

    def forward(self, x):
        h = torch.tanh(self.fc1(x))
        return self.log_hazard(torch.tanh(self.fc2(h))).squeeze(1).exp()


def valves(n):
    x = torch.randn(n, 6)  # pressure, temperature, age, cycles, ...
    rate = torch.exp(-17.5 + 0.8 * x[:, 0] + 0.5 * x[:, 1] * x[:, 2])
    life = -torch.log(torch.rand(n).clamp(min=1e-6)) / rate
    watched = 3.0e7 * torch.rand(n) + 1e6  # seconds
    return x, torch.minimum(life, watched), life < watched


torch.manual_seed(112)
model = HazardNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(300):
    x, seconds, failed = valves(256)
    hazard = model(x)
    log_survival = -hazard * seconds
    log_failure = torch.where(failed, log1mexp(hazard), torch.zeros(()))
    nll = -(log_survival + log_failure).mean()
    optimizer.zero_grad()
    nll.backward()
    optimizer.step()
    if step % 10 == 0:
        with torch.no_grad():
            exact = (hazard * seconds - failed * hazard.log()).mean()
        print(f"step {step} nll {nll.item():.3f} exact_loss {exact.item():.3f}")
