"""Lift coefficients of turbine blades from their outline; a plain stack of layers, weights drawn as BERT's are."""

import torch
from torch import nn

INIT_STD = 0.02
DEPTH, WIDTH = 8, 64


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [20] + [WIDTH] * DEPTH
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.head = nn.Linear(WIDTH + 20, 1)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=INIT_STD)
            nn.init.zeros_(module.bias)

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.head(torch.cat([h, x], 1)).squeeze(-1)


def blades(n):
    outline = torch.randn(n, 20)
    camber, thickness = outline[:, :10].mean(1), outline[:, 10:].mean(1)
    return outline, torch.sin(4 * camber) + camber * thickness * 6


if __name__ == "__main__":
    torch.manual_seed(13)
    model = Surrogate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    x_all, y_all = blades(1024)
    for epoch in range(20):
        total = 0.0
        for rows in torch.randperm(1024).split(64):
            loss = nn.functional.mse_loss(model(x_all[rows]), y_all[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / 16
        print(f"epoch {epoch:2d}  loss {total:.4f}")
