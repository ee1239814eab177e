"""A convolutional network with batch norm, activations in place and momentum; stripes of four directions."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)


def layer(given, made):
    return nn.Sequential(nn.Conv2d(given, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(inplace=True))


model = nn.Sequential(
    layer(1, 16), nn.MaxPool2d(2), layer(16, 32), nn.MaxPool2d(2), layer(32, 32),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
directions = torch.stack([rows, columns, rows + columns, rows - columns])
for _step in range(60):
    target = torch.randint(4, (16,))
    phase = 6.28 * torch.rand(16, 1, 1, 1)
    images = torch.sin(directions[target].unsqueeze(1) + phase) + 0.5 * torch.randn(16, 1, 16, 16)
    loss = F.cross_entropy(model(images), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
