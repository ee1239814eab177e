import torch
import torch.nn.functional as F
from graph import citation_graph
from layers import GCN

torch.manual_seed(0)
adjacency = citation_graph(60, 140, seed=4)
features = torch.randn(60, 16)
labels = torch.randint(4, (60,))
train_mask = torch.rand(60) < 0.6

net = GCN(16, 24, 4)
opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(10):
    opt.zero_grad()
    logits = net(features, adjacency)
    loss = F.cross_entropy(logits[train_mask], labels[train_mask])
    loss.backward()
    opt.step()
    print("epoch", epoch, "loss", loss.item())
