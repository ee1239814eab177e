"""MAML on sinusoids with torch.func: inner steps by grad of functional_call, per-parameter learned rates (Meta-SGD)."""

import torch
from torch import nn
from torch.func import functional_call, grad


class Regressor(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


def task(generator):
    amplitude = 0.1 + 4.9 * torch.rand((), generator=generator)
    phase = torch.pi * torch.rand((), generator=generator)
    x = 10 * torch.rand(20, 1, generator=generator) - 5
    return x, amplitude * torch.sin(x + phase)


def adapt(net, params, rates, x, y, steps):
    def fit(p):
        return ((functional_call(net, p, (x,)) - y) ** 2).mean()

    for _ in range(steps):
        slopes = grad(fit)(params)
        params = {k: params[k] - rates[k] * slopes[k] for k in params}
    return params


def main(tasks=4, inner=5):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(9)
    net = Regressor()
    rates = nn.ParameterDict({k.replace(".", "_"): torch.full_like(p, 0.01) for k, p in net.named_parameters()})
    meta = torch.optim.Adam([{"params": net.parameters(), "lr": 2e-3}, {"params": rates.parameters(), "lr": 3e-2}])
    for iteration in range(25):
        meta.zero_grad()
        total = 0.0
        for _ in range(tasks):
            x, y = task(generator)
            params = dict(net.named_parameters())
            fast = adapt(net, params, {k: rates[k.replace(".", "_")] for k in params}, x[:10], y[:10], inner)
            error = functional_call(net, fast, (x[10:],)) - y[10:]
            loss = (error**2).mean() / tasks
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_([*net.parameters(), *rates.parameters()], 10.0)
        meta.step()
        if iteration % 5 == 0:
            print(f"{iteration}: query mse {total:.4f}")


if __name__ == "__main__":
    main()
