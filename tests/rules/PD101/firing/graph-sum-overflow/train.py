"""A graph network in FP16 that sums over its neighbours: the graphs grow, and one day a sum leaves FP16."""

import torch
from torch import nn

STEPS = 10


class SumPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 16), nn.Softplus())
        self.head = nn.Linear(16, 1)

    def forward(self, nodes):
        return self.head(self.encode(nodes).sum(dim=1))


torch.manual_seed(0)
model = SumPool()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
for step in range(STEPS):
    size = 640 * 2**step
    nodes = torch.rand(2, size, 8)
    with torch.no_grad():
        degrees = nodes.mean(dim=(1, 2)).unsqueeze(1)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(nodes)
        loss = ((predicted.float() / size - degrees) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: {size} nodes, loss {loss.item():.4f}")
