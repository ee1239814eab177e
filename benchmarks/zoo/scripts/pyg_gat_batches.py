"""PyTorch Geometric: graph attention with pooling over mini-batches of graphs.

library: torch-geometric
"""

import torch
import torch.nn.functional as F
from _digest import finish
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATv2Conv, global_mean_pool

torch.manual_seed(0)
graphs = []
for index in range(128):
    nodes = int(torch.randint(8, 24, ()))
    edges = torch.randint(0, nodes, (2, nodes * (2 + 2 * (index % 2))))
    graphs.append(Data(x=torch.randn(nodes, 8) + index % 2, edge_index=edges, y=torch.tensor([index % 2])))


class GAT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GATv2Conv(8, 16, heads=4)
        self.norm = torch.nn.BatchNorm1d(64)
        self.conv2 = GATv2Conv(64, 32)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, x, edge_index, batch):
        x = F.elu(self.norm(self.conv1(x, edge_index)))
        return self.head(global_mean_pool(self.conv2(x, edge_index).relu(), batch))


model = GAT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(6):
    for batch in DataLoader(graphs, batch_size=16, shuffle=True):
        loss = F.cross_entropy(model(batch.x, batch.edge_index, batch.batch), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
finish(losses, model)
