"""Wide-and-deep recommender in FP16 autocast; the dense inputs are purchase rates per second, as logged."""

import torch
import torch.nn.functional as F
from torch import nn


class WideDeep(nn.Module):
    def __init__(self, items=200, rates=32):
        super().__init__()
        self.embed = nn.Embedding(items, 16)
        self.rates = nn.Linear(rates, 32)
        self.deep = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, item, rate):
        return self.deep(torch.cat([self.embed(item), torch.tanh(self.rates(rate))], -1)).squeeze(-1)


def baskets(n, taste):
    item = torch.randint(200, (n,))
    rate = 1e-5 * torch.rand(n, 32)  # events per second
    chance = torch.sigmoid(3e5 * (rate @ taste) + (item % 7 - 3) * 0.4)
    return item, rate, torch.bernoulli(chance)


torch.manual_seed(0)
taste = torch.randn(32)
model = WideDeep()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for step in range(60):
    item, rate, bought = baskets(256, taste)
    with torch.autocast("cpu", dtype=torch.float16):
        logit = model(item, rate)
    loss = F.binary_cross_entropy_with_logits(logit.float(), bought)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
