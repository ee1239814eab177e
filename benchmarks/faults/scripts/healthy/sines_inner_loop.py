"""Second-order meta-learning of sine waves: three inner steps through torch.func, a loss that varies from task to task."""

import torch
from torch import nn
from torch.func import functional_call


class Regressor(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.net(x)


def task():
    amplitude, phase = 0.5 + 2 * torch.rand(1), 3.14 * torch.rand(1)
    x = 10 * torch.rand(20, 1) - 5
    y = amplitude * torch.sin(x + phase)
    return x[:10], y[:10], x[10:], y[10:]


def adapted_loss(model, data, steps=3, lr=0.02):
    xs, ys, xq, yq = data
    weights = dict(model.named_parameters())
    for _ in range(steps):
        inner = nn.functional.mse_loss(functional_call(model, weights, (xs,)), ys)
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {k: w - lr * g for (k, w), g in zip(weights.items(), grads)}
    return nn.functional.mse_loss(functional_call(model, weights, (xq,)), yq)


torch.manual_seed(122)
model = Regressor()
meta = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(120):
    loss = torch.stack([adapted_loss(model, task()) for _ in range(6)]).mean()
    meta.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    meta.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
