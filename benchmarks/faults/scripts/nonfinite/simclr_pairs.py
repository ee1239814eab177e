"""SimCLR in FP16 autocast, NT-Xent written out."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
TEMPERATURE = 0.1


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.projector = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        return F.normalize(self.projector(self.features(x).mean((2, 3))), dim=-1)


def augment(x):
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(-1), x)
    return x * (0.8 + 0.4 * torch.rand(len(x), 3, 1, 1)) + 0.1 * torch.randn_like(x)


def nt_xent(z1, z2):
    z = torch.cat([z1, z2])
    n = len(z)
    similarity = torch.exp(z @ z.T / TEMPERATURE)
    similarity = similarity.masked_fill(torch.eye(n, dtype=torch.bool), 0.0)
    positives = torch.cat([similarity.diag(n // 2), similarity.diag(-n // 2)])
    return (similarity.sum(1).log() - positives.log()).mean()


encoder = Encoder()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.3, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
pictures = torch.rand(64, 3, 12, 12)
for epoch in range(6):
    for chunk in torch.randperm(64).split(32):
        with torch.autocast("cpu", torch.float16):
            loss = nt_xent(encoder(augment(pictures[chunk])), encoder(augment(pictures[chunk])))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    print(f"epoch {epoch}: {loss.item():.3f}")
