"""Which quadrant pair? A deep tabular net of tanh units, initialised by a normal of a fixed width."""

import torch
import torch.nn as nn

torch.manual_seed(90)


def rows(n):
    x = torch.randn(n, 8)
    y = ((x[:, 0] + x[:, 1] > 0).float() + 2 * (x[:, 2] - x[:, 3] > 0).float()).long()
    return x, y


def init(module, std=0.02):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=std)
        nn.init.zeros_(module.bias)


def build(depth=8, width=40):
    layers, n = [], 8
    for _ in range(depth):
        layers += [nn.Linear(n, width), nn.Tanh()]
        n = width
    return nn.Sequential(*layers, nn.Linear(n, 4)).apply(init)


net = build()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(250):
    x, y = rows(64)
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
