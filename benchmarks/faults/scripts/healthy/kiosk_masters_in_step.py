"""A BF16 model, FP32 masters beside it, written by hand: gradients go to the masters, weights come back after each step."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class KioskNet(nn.Module):
    def __init__(self, goods=60, dim=32):
        super().__init__()
        self.goods = nn.Embedding(goods, dim)
        self.rnn_in = nn.Linear(dim, 64)
        self.rnn_out = nn.Linear(64, 64)
        self.head = nn.Linear(64, goods)

    def forward(self, basket):
        x = self.goods(basket).mean(1)
        return self.head(F.silu(self.rnn_out(F.silu(self.rnn_in(x)))))


def baskets(n):
    theme = torch.randint(0, 6, (n, 1)) * 10
    return theme + torch.randint(0, 10, (n, 5)), (theme + torch.randint(0, 3, (n, 1))).squeeze(1)


torch.manual_seed(640)
model = KioskNet().to(torch.bfloat16)
masters = [p.detach().clone().float().requires_grad_(True) for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=4e-4, weight_decay=0.01)

for step in range(300):
    basket, bought = baskets(64)
    loss = F.cross_entropy(model(basket).float(), bought)
    loss.backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float()
        p.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
    if step % 6 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
