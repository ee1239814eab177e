"""PyTorch Geometric: a two-layer GCN classifies nodes of a random graph.

library: torch-geometric
"""

import torch
import torch.nn.functional as F
from _digest import finish
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

torch.manual_seed(0)
labels = torch.randint(0, 4, (300,))
edges = torch.randint(0, 300, (2, 4000))
same = labels[edges[0]] == labels[edges[1]]
keep = same | (torch.rand(4000) < 0.1)
features = F.one_hot(labels, 4).float().repeat(1, 8) + torch.randn(300, 32)
data = Data(x=features, edge_index=edges[:, keep], y=labels, train_mask=torch.rand(300) < 0.3)


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(32, 16)
        self.conv2 = GCNConv(16, 4)

    def forward(self, data):
        x = self.conv1(data.x, data.edge_index).relu()
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.conv2(x, data.edge_index), dim=1)


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
losses = []
for _ in range(100):
    model.train()
    optimizer.zero_grad()
    loss = F.nll_loss(model(data)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
