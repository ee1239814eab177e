"""Porosity of rock from well logs: an MLP of ten tanh layers, weights drawn from N(0, 0.02) as in GPT-2."""

import torch
import torch.nn as nn

STD = 0.02


class PorosityMLP(nn.Module):
    def __init__(self, curves=6, width=64, depth=10):
        super().__init__()
        sizes = [curves] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.out = nn.Linear(width, 1)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=STD)
            nn.init.zeros_(module.bias)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x).squeeze(-1)


def logs(n):
    x = torch.randn(n, 6)  # gamma ray, density, neutron, sonic, resistivity, caliper
    porosity = 0.6 * x[:, 1] - 0.5 * x[:, 2] + 0.4 * x[:, 3] * x[:, 0] + 0.2
    return x, porosity


torch.manual_seed(99)
net = PorosityMLP()
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
loss_fn = nn.MSELoss()
for step in range(300):
    x, y = logs(128)
    optimizer.zero_grad()
    loss = loss_fn(net(x), y)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss={loss.item():.4f}")
