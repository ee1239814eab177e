"""A graph convolution by hand on a synthetic citation graph, mini-batches of labelled nodes, step-decayed rate."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(47)
NODES, CLASSES, WORDS, HIDDEN = 600, 6, 64, 32

labels = torch.randint(CLASSES, (NODES,))
same = labels[:, None] == labels[None, :]
adjacency = (torch.rand(NODES, NODES) < torch.where(same, 0.025, 0.004)).float()
adjacency = ((adjacency + adjacency.T) > 0).float().fill_diagonal_(1.0)
inv_sqrt = adjacency.sum(1).rsqrt()
a_hat = inv_sqrt[:, None] * adjacency * inv_sqrt[None, :]
topic = torch.randn(CLASSES, WORDS)
words = (0.35 * topic[labels] + torch.randn(NODES, WORDS) > 1.0).float()
split = torch.randperm(NODES)
train_nodes, val_nodes = split[:320], split[320:]


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(WORDS, HIDDEN)
        self.lin2 = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x, a):
        h = F.relu(a @ self.lin1(x))
        return a @ self.lin2(F.dropout(h, 0.2, self.training))


model = GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)

for epoch in range(30):
    model.train()
    for batch in train_nodes[torch.randperm(len(train_nodes))].split(32):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words, a_hat)[batch], labels[batch])
        loss.backward()
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        out = model(words, a_hat)[val_nodes]
    val_loss = F.cross_entropy(out, labels[val_nodes]).item()
    acc = (out.argmax(1) == labels[val_nodes]).float().mean().item()
    print(f"epoch {epoch:2d} val loss {val_loss:.4f} acc {acc:.3f}")
