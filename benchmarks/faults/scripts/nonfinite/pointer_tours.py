"""A pointer network learns to visit cities from left to right; tours in a batch have different lengths."""

import torch
from torch import nn


class Pointer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ref = nn.Linear(dim, dim, bias=False)
        self.query = nn.Linear(dim, dim, bias=False)
        self.v = nn.Parameter(torch.randn(dim) / dim**0.5)

    def forward(self, memory, state, visited):
        scores = torch.tanh(self.ref(memory) + self.query(state)[:, None]) @ self.v
        scores = scores.masked_fill(visited, float("-inf"))
        return scores.log_softmax(-1)


class PointerNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Linear(2, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRUCell(dim, dim)
        self.pointer = Pointer(dim)
        self.start = nn.Parameter(torch.zeros(dim))

    def forward(self, cities, n_cities, tour):
        """Log probabilities of the given tours, summed over the cities of each."""
        x = self.embed(cities)
        memory, h = self.encoder(x)
        h, inp = h[0], self.start.expand(len(x), -1)
        rows = torch.arange(len(x))
        visited = torch.arange(cities.shape[1]) >= n_cities[:, None]
        total = 0.0
        for t in range(tour.shape[1]):
            h = self.decoder(inp, h)
            logp = self.pointer(memory, h, visited)
            pick = tour[:, t]
            alive = (t < n_cities).float()
            total = total + alive * logp[rows, pick]
            visited = visited.clone()
            visited[rows, pick] = True
            inp = x[rows, pick]
        return total


def tours(batch, longest, shortest):
    n = torch.randint(shortest, longest + 1, (batch,))
    cities = torch.rand(batch, longest, 2)
    order = cities[..., 0].masked_fill(torch.arange(longest) >= n[:, None], 9.0)
    return cities, n, order.argsort(1)


torch.manual_seed(8)
net = PointerNet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
for epoch in range(4):
    # curriculum: full tours at first, then tours of mixed length
    shortest = 8 if epoch < 2 else 5
    for it in range(6):
        cities, n, tour = tours(12, 8, shortest)
        nll = -(net(cities, n, tour) / n).mean()
        optimizer.zero_grad()
        nll.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch}: nll {nll.item():.4f}")
