"""River levels with an LSTM whose weights are BF16 only; every update is rounded at random, so none is lost on average."""

import torch
from torch import nn


class RandomRoundingSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                buf.mul_(group["momentum"]).add_(p.grad.float())
                target = p.float() - group["lr"] * buf
                ulp = 2.0 ** (target.abs().clamp(min=1e-30).log2().floor() - 7)
                p.copy_(target + (torch.rand_like(target) - 0.5) * ulp)


class Level(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.lstm = nn.LSTM(2, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, rain):
        h, _ = self.lstm(rain)
        return self.out(h)[..., 0]


def storms(n, hours=30):
    rain = torch.relu(torch.randn(n, hours, 2) - 0.5)
    level, out = torch.zeros(n), []
    for t in range(hours):
        level = 0.85 * level + 0.3 * rain[:, t, 0] + 0.15 * rain[:, t, 1]
        out.append(level)
    return rain, torch.stack(out, 1)


torch.manual_seed(101)
model = Level().to(torch.bfloat16)
optimizer = RandomRoundingSGD(model.parameters(), lr=0.01)
for step in range(150):
    rain, level = storms(24)
    loss = nn.functional.mse_loss(model(rain.to(torch.bfloat16)).float(), level)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
