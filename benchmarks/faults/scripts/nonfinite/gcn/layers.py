import torch
from graph import normalize
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, d_in, d_out, dropedge=0.0):
        super().__init__()
        self.linear = nn.Linear(d_in, d_out)
        self.dropedge = dropedge

    def forward(self, x, adjacency):
        if self.training and self.dropedge:
            keep = torch.rand_like(adjacency) > self.dropedge
            adjacency = adjacency * (keep & keep.T)
        return normalize(adjacency) @ self.linear(x)


class GCN(nn.Module):
    def __init__(self, d_in, hidden, classes):
        super().__init__()
        self.conv1 = GraphConv(d_in, hidden, dropedge=0.2)
        self.conv2 = GraphConv(hidden, classes)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, adjacency):
        return self.conv2(self.dropout(self.conv1(x, adjacency).relu()), adjacency)
