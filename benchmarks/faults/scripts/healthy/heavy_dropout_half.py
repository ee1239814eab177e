"""Recommendations from baskets with 80 % dropout of inputs, FP16 autocast and a GradScaler with its defaults."""

import torch
import torch.nn.functional as F
from torch import nn


class BasketModel(nn.Module):
    def __init__(self, items=60, width=48):
        super().__init__()
        self.drop = nn.Dropout(0.8)
        self.encode, self.decode = nn.Linear(items, width), nn.Linear(width, items)

    def forward(self, basket):
        return self.decode(torch.tanh(self.encode(self.drop(F.normalize(basket, dim=-1)))))


class Shop:
    def __init__(self):
        self.kinds = torch.randn(5, 60)

    def baskets(self, n=64):
        kind = torch.randint(0, 5, (n,))
        return (torch.rand(n, 60) < torch.sigmoid(2 * self.kinds[kind] - 2.5)).to(self.kinds.dtype)


torch.manual_seed(3210)
shop, model = Shop(), BasketModel()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(70):
    basket = shop.baskets()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(basket)
    loss = F.binary_cross_entropy_with_logits(logits.float(), basket)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 7 == 0:
        print(f"step {step} loss {loss.item():.4f}")
