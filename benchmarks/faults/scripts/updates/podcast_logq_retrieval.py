"""Two towers for podcasts, in-batch negatives, corrected by the logarithm of how often an episode was seen."""

import torch
import torch.nn.functional as F
from torch import nn

EPISODES, LISTENERS = 240, 500


class Popularity(nn.Module):
    """Counts of all episodes so far; they travel with the model, so they are small."""

    def __init__(self, episodes):
        super().__init__()
        self.register_buffer("count", torch.ones(episodes, dtype=torch.bfloat16))

    @torch.no_grad()
    def observe(self, episode):
        self.count.index_add_(0, episode, torch.ones(len(episode), dtype=self.count.dtype))

    def forward(self, episode):
        share = self.count.float() / self.count.float().sum()
        return share.log()[episode]


class TwoTowers(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.listener, self.episode = nn.Embedding(LISTENERS, dim), nn.Embedding(EPISODES, dim)
        self.listener_mlp = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, dim))
        self.episode_mlp = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, dim))
        self.bias = nn.Embedding(EPISODES, 1)
        self.popularity = Popularity(EPISODES)
        nn.init.zeros_(self.bias.weight)

    def score(self, listener, episode):
        u = self.listener_mlp(self.listener(listener))
        v = self.episode_mlp(self.episode(episode))
        return u @ v.t() + self.bias(episode).squeeze(1)

    def forward(self, listener, episode):
        logits = self.score(listener, episode) - self.popularity(episode)
        same = (episode[:, None] == episode) & ~torch.eye(len(episode), dtype=torch.bool)
        return logits.masked_fill(same, -1e4)


class Plays:
    def __init__(self, g):
        taste = torch.randn(LISTENERS, 6, generator=g) @ torch.randn(6, EPISODES, generator=g) / 2
        rank = torch.arange(1, EPISODES + 1).float()
        self.p = (taste - 1.3 * rank.log()).softmax(1)
        self.g = g

    def draw(self, n):
        listener = torch.randint(0, LISTENERS, (n,), generator=self.g)
        return listener, torch.multinomial(self.p[listener], 1, generator=self.g).squeeze(1)


def evaluate(model, listener, episode):
    with torch.no_grad():
        return F.cross_entropy(model.score(listener, torch.arange(EPISODES)), episode).item()


if __name__ == "__main__":
    torch.manual_seed(91)
    plays = Plays(torch.Generator().manual_seed(92))
    model = TwoTowers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-3)
    held_out = plays.draw(2048)
    seen = 0
    for step in range(300):
        listener, episode = plays.draw(192)
        model.popularity.observe(episode)
        seen += len(episode)
        train = F.cross_entropy(model(listener, episode), torch.arange(len(episode)))
        optimizer.zero_grad()
        train.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1} in-batch {train.item():.4f} loss {evaluate(model, *held_out):.4f}")
