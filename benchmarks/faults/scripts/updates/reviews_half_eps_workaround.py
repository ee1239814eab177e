"""Star ratings from reviews, with model.half(). Adam gave NaN at once, so its eps was raised until the NaNs were gone."""

import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 1e-3
VOCAB = 300


class ReviewNet(nn.Module):
    def __init__(self, dim=48, stars=5):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.fc1 = nn.Linear(dim, 96)
        self.fc2 = nn.Linear(96, 96)
        self.fc3 = nn.Linear(96, stars)

    def forward(self, tokens):
        x = self.embedding(tokens).mean(1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def reviews(n, length=16):
    stars = torch.randint(5, (n,))
    mood = stars[:, None] * 20 + torch.randint(20, (n, length))
    filler = torch.randint(100, VOCAB, (n, length))
    return torch.where(torch.rand(n, length) < 0.3, mood, filler), stars


torch.manual_seed(5)
model = ReviewNet().half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=EPS)
for step in range(200):
    tokens, stars = reviews(128)
    loss = F.cross_entropy(model(tokens).float(), stars)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:3d} loss {loss.item():.4f}")
