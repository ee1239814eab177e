"""A pointer network learns to visit towns from left to right; towns already visited get a logit of minus infinity."""

import torch
from torch import nn


class Pointer(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Linear(2, dim)
        self.encoder = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)
        self.start = nn.Parameter(torch.zeros(dim))
        self.cell = nn.GRUCell(dim, dim)
        self.query = nn.Linear(dim, dim)

    def forward(self, towns, tour):
        h = self.encoder(self.embed(towns))
        state, inp = h.mean(1), self.start.expand(len(towns), -1)
        visited = torch.zeros(towns.shape[:2], dtype=torch.bool)
        rows, out = torch.arange(len(towns)), []
        for t in range(towns.shape[1]):
            state = self.cell(inp, state)
            scores = (h @ self.query(state).unsqueeze(-1)).squeeze(-1) / h.shape[-1] ** 0.5
            out.append(scores.masked_fill(visited, float("-inf")).log_softmax(-1))
            choice = tour[:, t]
            visited = visited.clone()
            visited[rows, choice] = True
            inp = h[rows, choice]
        return torch.stack(out, 1)


torch.manual_seed(105)
model = Pointer()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(90):
    towns = torch.rand(24, 8, 2)
    tour = towns[..., 0].argsort(1)
    log_p = model(towns, tour)
    loss = -log_p.gather(2, tour.unsqueeze(2)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
