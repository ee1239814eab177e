"""A session recommender with parameter groups; the new head's 0.5 was meant to be a factor, not a rate."""

import torch
import torch.nn.functional as F
from torch import nn


class Session(nn.Module):
    def __init__(self, items=100, dim=24):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.attend = nn.Linear(dim, 1)
        self.mlp = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, items))

    def forward(self, clicks):
        x = self.items(clicks)
        weight = torch.softmax(self.attend(torch.tanh(x)), 1)
        return self.mlp((weight * x).sum(1))


torch.manual_seed(0)
model = Session()
body = [p for n, p in model.named_parameters() if not n.startswith("mlp")]
optimizer = torch.optim.Adam([{"params": body, "lr": 4e-3}, {"params": model.mlp.parameters(), "lr": 0.5}])
for step in range(80):
    clicks = (torch.randint(100, (64, 1)) + torch.randint(3, (64, 5))) % 100
    loss = F.cross_entropy(model(clicks), (clicks[:, 0] + 3) % 100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
