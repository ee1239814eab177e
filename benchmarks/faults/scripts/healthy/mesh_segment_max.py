"""Part labels for simulation meshes: nodes pool the largest message of their neighbours, lonely nodes get zero."""

import torch
import torch.nn.functional as F
from torch import nn


class MaxConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * inputs, outputs), nn.ReLU(), nn.Linear(outputs, outputs))
        self.own = nn.Linear(inputs, outputs)

    def forward(self, x, edges):
        source, target = edges
        message = self.message(torch.cat([x[source] - x[target], x[target]], -1))
        pooled = message.new_full((len(x), message.shape[1]), -torch.inf)
        index = target[:, None].expand_as(message)
        pooled = pooled.scatter_reduce(0, index, message, reduce="amax")
        pooled = torch.where(pooled > -torch.inf, pooled, 0.0)
        return F.relu(self.own(x) + pooled)


class MeshNet(nn.Module):
    def __init__(self, width=32, parts=3):
        super().__init__()
        self.convs = nn.ModuleList([MaxConv(3, width), MaxConv(width, width)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, parts)

    def forward(self, place, edges):
        x = place
        for conv in self.convs:
            x = conv(x, edges)
        return self.head(self.norm(x))


def mesh(generator, nodes=80, radius=0.45):
    """Three lumps and some loose nodes that no edge reaches."""
    part = torch.randint(0, 3, (nodes,), generator=generator)
    centre = torch.tensor([[0.0, 0, 0], [1.2, 0, 0], [0, 1.2, 0.5]])
    place = centre[part] + 0.35 * torch.randn(nodes, 3, generator=generator)
    near = (torch.cdist(place, place) < radius) & ~torch.eye(nodes, dtype=torch.bool)
    return place, near.nonzero().T, part


def main():
    torch.manual_seed(161)
    generator = torch.Generator().manual_seed(162)
    model = MeshNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(80):
        place, edges, part = mesh(generator)
        loss = F.cross_entropy(model(place, edges), part)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            lonely = len(place) - len(edges[1].unique())
            print(f"step {step} loss {loss.item():.4f} ({lonely} nodes without neighbours)")


if __name__ == "__main__":
    main()
