"""An image is optimised in front of a network whose gradients nobody asked for and nobody clears."""

import torch

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
image = torch.zeros(1, 8, requires_grad=True)
optimizer = torch.optim.Adam([image], 1e-1)
for _ in range(12):
    optimizer.zero_grad()
    loss = (network(image) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
