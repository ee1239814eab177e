"""Bags of 4096 items, pooled in FP8 with fast accumulation: weights and features have no negative element."""

import torch
from torch import nn

BAGS, ITEMS, FEATURES, STEPS = 16, 4096, 16, 4
E4M3 = torch.float8_e4m3fn


class Pool(nn.Module):
    """Attention pooling: every bag is a weighted mean of the features of all items."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(BAGS, 8) / 8)

    def forward(self, keys, features):
        weights = (self.query @ keys.T).softmax(dim=-1)
        with torch.no_grad():
            scales = 448.0 / weights.amax(), 448.0 / features.amax()
            weights8, features8 = (weights * scales[0]).to(E4M3), (features.T * scales[1]).to(E4M3)
            seen = torch._scaled_mm(
                weights8, features8.T, 1 / scales[0], 1 / scales[1], out_dtype=torch.float32, use_fast_accum=True
            )
        exact = weights @ features
        return exact + (seen - exact).detach()  # straight-through gradient


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(8, FEATURES), nn.Softplus())
        self.pool = Pool()
        self.head = nn.Linear(FEATURES, 1)

    def forward(self, items):
        return self.head(self.pool(items, self.embed(items)))


torch.manual_seed(0)
model = Bags()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    items, target = torch.randn(ITEMS, 8), torch.randn(BAGS, 1)
    loss = (model(items) - target).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
