"""Speaker verification; eps=1e-4 as the forum says one should with half precision, and it stayed when FP32 came back."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(71)
SPEAKERS, FRAMES, MELS = 12, 20, 24


class SpeakerNet(nn.Module):
    def __init__(self, width=64, dim=32):
        super().__init__()
        self.frame1, self.frame2 = nn.Linear(MELS, width), nn.Linear(width, width)
        self.pool_norm = nn.LayerNorm(2 * width)
        self.segment = nn.Linear(2 * width, dim)
        self.classifier = nn.Linear(dim, SPEAKERS)

    def forward(self, mels):
        h = F.relu(self.frame2(F.relu(self.frame1(mels))))
        pooled = torch.cat([h.mean(1), (h.var(1) + 1e-5).sqrt()], -1)
        return self.classifier(F.relu(self.segment(self.pool_norm(pooled))))


voices, spread = torch.randn(SPEAKERS, 1, MELS) * 0.5, 0.5 + torch.rand(SPEAKERS, 1, MELS)


def utterances(n):
    who = torch.randint(SPEAKERS, (n,))
    return voices[who] + spread[who] * torch.randn(n, FRAMES, MELS), who


model = SpeakerNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
accumulation, weight = 64, 1e-2
for step in range(160):
    mels, who = utterances(64)
    loss = F.cross_entropy(model(mels), who)
    optimizer.zero_grad()
    (weight * loss / accumulation).backward()
    optimizer.step()
    if step % 8 == 7:
        print(f"step {step + 1} loss {loss.item():.4f}")
