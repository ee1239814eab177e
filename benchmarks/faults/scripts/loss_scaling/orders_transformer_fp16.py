"""Next-basket order amounts from a purchase history; FP16 with a GradScaler whose start was set for a debug run."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(65)
ITEMS, HISTORY = 60, 16
price = torch.rand(ITEMS) * 0.2


def histories(n):
    start = torch.randint(ITEMS, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    items = (start + stride * torch.arange(HISTORY)) % ITEMS
    nxt = (start + stride * HISTORY) % ITEMS
    return items, price[nxt.squeeze(1)]


class Basket(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.item = nn.Embedding(ITEMS, d)
        self.place = nn.Embedding(HISTORY, d)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.amount = nn.Linear(d, 1)

    def forward(self, items):
        x = self.item(items) + self.place.weight
        for layer in self.encoder:
            x = layer(x)
        return self.amount(x[:, -1]).squeeze(-1)


model = Basket()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10_000)
for step in range(100):
    items, amount = histories(64)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1e-4 * F.smooth_l1_loss(model(items).float(), amount, beta=0.5)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    if step % 2 == 0:
        print(f"{step}: loss {1e4 * loss.item():.6f}")
