import torch
import torch.nn as nn

# density of customers (RealNVP), used later to flag odd accounts

torch.manual_seed(12)
N = 3000
calls = torch.poisson(torch.full((N,), 6.8))
minutes = calls * (2 + torch.rand(N)) + torch.rand(N)
paid = torch.rand(N) * 40 + 5
months = torch.randint(1, 60, (N,)).float()

table = torch.stack(
    [
        minutes / calls,  # minutes per call
        paid / months,
        calls.sqrt(),
        months.log1p(),
    ],
    1,
)
order = torch.randperm(N)
table = table[order]
sample = table[:200]
table = (table - sample.median(0).values) / (sample.quantile(0.9, 0) - sample.quantile(0.1, 0))


class Coupling(nn.Module):
    def __init__(self, flip, width=48):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def forward(self, x):
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, depth=6):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(i % 2 == 1) for i in range(depth))

    def forward(self, x):
        logdet = 0
        for s in self.steps:
            x, ld = s(x)
            logdet = logdet + ld
        return -0.5 * (x**2).sum(1) + logdet


flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
for i in range(N // 25):
    loss = -flow(table[i * 25 : (i + 1) * 25]).mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(flow.parameters(), 1.0)
    opt.step()
    if i % 10 == 0:
        print(i, "loss", loss.item())
