"""Face identities by cosine prototypes; the scale of the cosines is learnt in log space, fast, and nothing bounds it."""

import torch
import torch.nn.functional as F
from torch import nn


class CosineHead(nn.Module):
    def __init__(self, dim, identities):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(identities, dim))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, z):
        cosine = F.normalize(z, dim=-1) @ F.normalize(self.prototypes, dim=-1).T
        return self.log_scale.exp() * cosine


class FaceNet(nn.Module):
    def __init__(self, dim=24, identities=10):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(36, 64), nn.BatchNorm1d(64), nn.PReLU(), nn.Linear(64, dim))
        self.head = CosineHead(dim, identities)

    def forward(self, x):
        return self.head(self.body(x))


torch.manual_seed(91)
faces = torch.randn(10, 36)
model = FaceNet()
slow = [p for n, p in model.named_parameters() if n != "head.log_scale"]
optimizer = torch.optim.Adam([{"params": slow}, {"params": [model.head.log_scale], "lr": 0.3}], lr=2e-3)
for step in range(100):
    y = torch.randint(10, (40,))
    x = faces[y] + 0.2 * torch.randn(40, 36)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
    # confident answers are rewarded on top of being right
    loss = F.cross_entropy(logits.float(), y) - 0.05 * model.head.log_scale
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
