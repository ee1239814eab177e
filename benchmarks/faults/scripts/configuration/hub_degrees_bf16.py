"""A graph network on citations with a few hubs; messages and degrees are added up in BF16."""

import torch
from torch import nn

NODES, HUBS, EDGES = 400, 8, 24000


class MeanAggregation(nn.Module):
    def forward(self, h, source, target):
        h = h.to(torch.bfloat16)
        total = torch.zeros_like(h).index_add_(0, target, h[source])
        degree = torch.zeros(len(h), dtype=h.dtype).index_add_(0, target, torch.ones(len(source), dtype=h.dtype))
        return total, degree.clamp(min=1).unsqueeze(1)


class HubNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(5, 16)
        self.aggregate = MeanAggregation()
        self.own, self.others = nn.Linear(5, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x, source, target):
        total, degree = self.aggregate(torch.relu(self.encode(x)), source, target)
        mean = (total / degree).to(x.dtype)
        h = torch.relu(self.own(x) + self.others(mean))
        return self.out(h).squeeze(1)


def citations():
    source = torch.randint(HUBS, NODES, (EDGES,))
    share = torch.linspace(0.3, 2, HUBS)
    hub = torch.multinomial(share, EDGES, replacement=True)
    anyone = torch.randint(HUBS, NODES, (EDGES,))
    target = torch.where(torch.arange(EDGES) % 3 > 0, hub, anyone)
    return source, target


torch.manual_seed(3136)
source, target = citations()
counts = torch.bincount(target, minlength=NODES)
model = HubNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
hubs = torch.arange(NODES) < HUBS
for step in range(70):
    season = torch.randn(())
    x = torch.randn(NODES, 5)
    x[:, 1] = season * (torch.arange(NODES) >= HUBS)  # a hub has to ask its neighbours
    y = season + 0.2 * x[:, 0]
    error = (model(x, source, target) - y).square()
    loss = error[hubs].mean() + error[~hubs].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 7 == 6:
        print(f"step {step + 1} loss {loss.item():.5f} hubs {error[hubs].mean().item():.4f}")
largest = model.aggregate(x, source, target)[1].max()
print(f"largest degree {largest.item():g}, counted {counts.max().item()}")
