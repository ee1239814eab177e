"""A message-passing network on big random graphs; the readout is the mean over all nodes. FP16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

NODES = 3000


class GraphConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, h, neighbours):
        return torch.tanh(self.own(h) + self.others(h[neighbours].mean(1)))


class GraphRegressor(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(4, width), GraphConv(width, width)
        self.readout = nn.Linear(width, 1)

    def forward(self, x, neighbours):
        h = self.conv2(self.conv1(x, neighbours), neighbours)
        return self.readout(h.mean(0)).squeeze(-1)


def graph(g):
    kind = torch.rand(1, generator=g)
    x = torch.randn(NODES, 4, generator=g)
    x[:, 0] += 2 * kind
    neighbours = torch.randint(0, NODES, (NODES, 3), generator=g)
    return x, neighbours, 1.0 + 0.3 * torch.sin(4 * kind).squeeze()


class Runner:
    graphs_per_step = 4

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-12)
        self.data = torch.Generator().manual_seed(77)

    def step(self):
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(self.graphs_per_step):
            x, neighbours, y = graph(self.data)
            with torch.autocast("cpu", dtype=torch.float16):
                out = self.model(x, neighbours)
            loss = F.mse_loss(out.float(), y)
            (1e-3 * loss / self.graphs_per_step).backward()
            total += loss.item() / self.graphs_per_step
        self.optimizer.step()
        return total


if __name__ == "__main__":
    torch.manual_seed(3110)
    runner = Runner(GraphRegressor())
    for i in range(40):
        value = runner.step()
        if i % 4 == 3:
            print(f"step {i + 1:2d}   loss {value:.5f}")
