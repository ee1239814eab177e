"""Edge convolutions over the nearest neighbours of lidar points, in metres of the national grid."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def knn(x, k):
    inner = -2 * torch.matmul(x, x.transpose(2, 1))
    xx = torch.sum(x**2, dim=2, keepdim=True)
    pairwise_distance = -xx - inner - xx.transpose(2, 1)
    return pairwise_distance.topk(k=k, dim=-1)[1]


def edge_features(x, index):
    n = x.shape[0]
    neighbours = x[torch.arange(n)[:, None, None], index]
    return neighbours - x.unsqueeze(2)


class EdgeConv(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(c_in, c_out), nn.ReLU(), nn.Linear(c_out, c_out))

    def forward(self, x, k):
        return self.mlp(edge_features(x, knn(x, k))).max(2)[0]


class DGCNN(nn.Module):
    def __init__(self, k=8, width=32, classes=3):
        super().__init__()
        self.k = k
        self.conv1 = EdgeConv(3, width)
        self.fc = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, points):
        x = self.conv1(points, self.k)
        return self.head(F.relu(self.fc(x.mean(1))))


def tiles(n, points=96):
    """Grass, shrubs or reeds: returns that are single, in small clumps, or in large ones."""
    kind = torch.randint(0, 3, (n,))
    owner = torch.stack([torch.arange(points) // size for size in (1, 3, 12)])[kind]
    clumps = torch.rand(n, points, 3) * torch.tensor([10.0, 10.0, 1.0])
    xyz = clumps.gather(1, owner.unsqueeze(-1).expand(-1, -1, 3)) + 0.1 * torch.randn(n, points, 3)
    return xyz + torch.tensor([691_000.0, 5_334_000.0, 500.0]) / 100, kind


torch.manual_seed(40)
model = DGCNN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(120):
    xyz, kind = tiles(16)
    loss = F.cross_entropy(model(xyz), kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")

exact = torch.cdist(xyz.double(), xyz.double(), compute_mode="donot_use_mm_for_euclid_dist").topk(8, largest=False)[1]
found = knn(xyz, 8)
hits = float((found.unsqueeze(-1) == exact.unsqueeze(-2)).any(-1).double().mean())
