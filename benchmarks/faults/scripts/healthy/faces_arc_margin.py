"""Identity embeddings with an additive angular margin: logits of plus and minus 30, a loss that begins above 15."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(64)
IDS, D = 20, 32
prototypes = torch.randn(IDS, D)


class ArcHead(nn.Module):
    def __init__(self, d, classes, s=30.0, m=0.4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, d))
        self.s, self.m = s, m

    def forward(self, x, labels):
        cosine = F.normalize(x, dim=-1) @ F.normalize(self.weight, dim=-1).T
        theta = cosine.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        target = torch.cos(theta + self.m)
        return self.s * torch.where(F.one_hot(labels, IDS).bool(), target, cosine)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(D, 64), nn.BatchNorm1d(64), nn.PReLU(), nn.Linear(64, 16), nn.BatchNorm1d(16)
        )
        self.head = ArcHead(16, IDS)

    def forward(self, x, labels):
        return self.head(self.body(x), labels)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
for step in range(150):
    y = torch.randint(IDS, (64,))
    x = prototypes[y] + 0.7 * torch.randn(64, D)
    loss = F.cross_entropy(net(x, y), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
