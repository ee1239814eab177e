"""Next track in a playlist: track and user embeddings and a small mixer, all weights in BF16, step decay."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(64)
TRACKS, USERS, D = 80, 40, 16
mood = torch.randint(8, (TRACKS,))
taste = torch.randint(8, (2, USERS))


def sessions(n, epoch):
    """A user mostly hears the mood they like; what they like is another mood after the summer."""
    user = torch.randint(USERS, (n,))
    liked = taste[int(epoch >= 5)][user]
    nxt = torch.stack([torch.nonzero(mood == m)[:, 0][torch.randint(int((mood == m).sum()), ())] for m in liked])
    last = torch.randint(TRACKS, (n, 3))
    return user, last, nxt


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, D)
        self.tracks = nn.Embedding(TRACKS, D)
        self.mix = nn.Sequential(nn.Linear(2 * D, 48), nn.ReLU(), nn.Linear(48, D))

    def forward(self, user, last):
        z = self.mix(torch.cat([self.users(user), self.tracks(last).mean(1)], 1))
        return z @ self.tracks.weight.T


model = Mixer().to(torch.bfloat16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4], gamma=0.1)
for epoch in range(14):
    for i in range(30):
        user, last, nxt = sessions(32, epoch)
        loss = F.cross_entropy(model(user, last).float(), nxt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 6 == 5:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    scheduler.step()
