"""Node classification with all-FP16 weights and a hand-written loss scale, divided out again in place."""

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 4096.0


class GraphConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.lin = nn.Linear(cin, cout)

    def forward(self, x, adjacency):
        return adjacency @ self.lin(x)


class GCN(nn.Module):
    def __init__(self, features=32, hidden=32, classes=5):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (
            GraphConv(features, hidden),
            GraphConv(hidden, hidden),
            GraphConv(hidden, classes),
        )

    def forward(self, x, adjacency):
        x = F.relu(self.conv1(x, adjacency))
        x = F.relu(self.conv2(x, adjacency))
        return self.conv3(x, adjacency)


torch.manual_seed(0)
nodes = 1000
label = torch.randint(5, (nodes,))
same = (label[:, None] == label[None, :]).float()
edges = torch.bernoulli(0.002 + 0.01 * same)
edges = ((edges + edges.T) > 0).float() + torch.eye(nodes)
adjacency = (edges / edges.sum(1, keepdim=True)).half()
x = (0.2 * torch.randn(nodes, 32) + 0.6 * F.one_hot(label, 32)).half()
model = GCN().half()
optimizer = torch.optim.SGD(model.parameters(), lr=3000.0)
for epoch in range(60):
    logits = model(x, adjacency).float()
    loss = F.cross_entropy(logits, label) / nodes  # per node
    optimizer.zero_grad()
    (loss * SCALE).backward()
    for p in model.parameters():
        p.grad.div_(SCALE)
    optimizer.step()
    if epoch % 2 == 0:
        print(f"epoch {epoch}: loss {nodes * loss.item():.4f}")
