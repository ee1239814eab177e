"""Graph convolutions and attention of PyTorch Geometric: gathers and scatters."""

import torch
from common import DEVICE, tell
from torch.nn import functional as F
from torch_geometric.nn import GATConv, GCNConv


class Graphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.attention, self.head = GCNConv(16, 32), GATConv(32, 8, heads=4), torch.nn.Linear(32, 5)

    def forward(self, x, edges):
        return self.head(self.attention(self.conv(x, edges).relu(), edges).relu())


model = Graphs().to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x, edges = torch.randn(200, 16, device=DEVICE), torch.randint(200, (2, 800), device=DEVICE)
labels = torch.randint(5, (200,), device=DEVICE)
for _ in range(20):
    loss = F.cross_entropy(model(x, edges), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
tell(model)
