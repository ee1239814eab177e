"""Heat load of a district, pruned while it trains: the cubic schedule takes each layer to 80 % zeros by two thirds."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(30)
STEPS, BEGIN, END, TARGET = 480, 80, 320, 0.8
coupling = torch.randn(10, 3)


class Pruner:
    """Magnitude masks per layer, renewed every 20 steps (Zhu and Gupta)."""

    def __init__(self, model):
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features > 1]
        self.masks = [torch.ones_like(m.weight) for m in self.layers]

    def sparsity(self, step):
        progress = min(max((step - BEGIN) / (END - BEGIN), 0.0), 1.0)
        return TARGET * (1 - (1 - progress) ** 3)

    @torch.no_grad()
    def __call__(self, step):
        for i, layer in enumerate(self.layers):
            if step % 20 == 0 and BEGIN <= step <= END:
                cut = layer.weight.abs().flatten().quantile(self.sparsity(step))
                self.masks[i] = (layer.weight.abs() > cut).float()
            layer.weight.mul_(self.masks[i])


def days(n):
    x = torch.randn(n, 10)
    z = x @ coupling / 3
    return x, torch.sin(2 * z[:, 0]) + z[:, 1] * z[:, 2]


model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
prune = Pruner(model)
for step in range(STEPS):
    x, y = days(64)
    loss = F.mse_loss(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    prune(step)
    if step % 8 == 0:
        print(f"step {step} sparsity {prune.sparsity(step):.2f} loss {loss.item():.4f}")
