import torch
from torch import nn


class TwoTower(nn.Module):
    def __init__(self, users=300, songs=5000, dim=16):
        super().__init__()
        self.user = nn.Embedding(users, dim, sparse=True)
        self.song = nn.Embedding(songs, dim, sparse=True)
        self.bias = nn.Embedding(songs, 1, sparse=True)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.song.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, u, s):
        return (self.user(u) * self.song(s)).sum(-1) + self.bias(s).squeeze(-1)


torch.manual_seed(6)
taste, style = torch.randn(300, 4), torch.randn(5000, 4)
popularity = 1.0 / torch.arange(1, 5001).float()
model = TwoTower()
optimizer = torch.optim.SparseAdam(model.parameters(), lr=2e-2)
bce = nn.BCEWithLogitsLoss()
for step in range(220):
    u = torch.randint(0, 300, (512,))
    s = torch.multinomial(popularity, 512, replacement=True)
    liked = ((taste[u] * style[s]).sum(-1) > 0).float()
    loss = bce(model(u, s), liked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
