"""Speaker mood from log-mel frames in dB: frame encoder, attentive pooling, two linear layers."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(97)
MELS, FRAMES, MOODS = 32, 25, 4
tilt = torch.randn(MOODS, MELS)


def clips(n):
    mood = torch.randint(MOODS, (n,))
    active = (torch.rand(n, FRAMES, 1) < 0.4).float()
    level = -38 + 12 * torch.randn(n, FRAMES, 1)
    db = level + 5 * torch.randn(n, FRAMES, MELS) + 1.5 * active * tilt[mood][:, None]
    return db.clamp(-80, 0), mood


class FrameEncoder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.lift = nn.Linear(MELS, d)
        self.act = nn.Tanh()
        self.mix = nn.Conv1d(d, d, 3, padding=1)

    def forward(self, x):
        h = self.act(self.lift(x))
        return h + F.gelu(self.mix(h.mT)).mT


class Pool(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.key, self.score = nn.Linear(d, d), nn.Linear(d, 1)

    def forward(self, h):
        weight = self.score(torch.tanh(self.key(h))).softmax(1)
        return (weight * h).sum(1)


class MoodNet(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.frames, self.pool = FrameEncoder(d), Pool(d)
        self.classify = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.GELU(), nn.Linear(d, MOODS))

    def forward(self, db):
        x = db
        return self.classify(self.pool(self.frames(x)))


model = MoodNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(160):
    db, mood = clips(32)
    loss = F.cross_entropy(model(db), mood)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print("step", step, "loss", f"{loss.item():.4f}")
