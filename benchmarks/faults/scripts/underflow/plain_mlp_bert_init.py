"""A deep MLP without skips or norms whose weights are drawn like BERT's: normal with a deviation of 0.02."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DEPTH, WIDTH = 12, 64
INIT = "bert"


def init_weights(module):
    if isinstance(module, nn.Linear):
        if INIT == "bert":
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        else:
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)


class MLP(nn.Module):
    def __init__(self, inputs=16, classes=4):
        super().__init__()
        self.inp = nn.Linear(inputs, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, classes)
        self.apply(init_weights)

    def forward(self, x):
        x = F.relu(self.inp(x))
        for layer in self.hidden:
            x = F.relu(layer(x))
        return self.out(x)


def blobs(n, centers):
    y = torch.randint(4, (n,))
    return centers[y] + 0.5 * torch.randn(n, 16), y


torch.manual_seed(2118)
centers = torch.randn(4, 16)
model = MLP()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(200):
    x, y = blobs(64, centers)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
