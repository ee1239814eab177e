"""Predicts the cost of a web request from its tokens: one price per token, kept as bfloat16."""

import torch
from torch import nn


class TokenPrices(nn.Module):
    def __init__(self, vocab=128):
        super().__init__()
        self.tokens = nn.Embedding(vocab, 1, dtype=torch.bfloat16)
        nn.init.zeros_(self.tokens.weight)

    def forward(self, ids):
        return self.tokens(ids).float().mean(1).squeeze(1)


def requests(n, price, length=64):
    ids = torch.where(torch.rand(n, length) < 0.75, 0, torch.randint(1, 128, (n, length)))
    return ids, price[ids].mean(1)


def main(batches=100):
    price = 3.0 + torch.randn(128)
    model = TokenPrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for i in range(batches):
        ids, y = requests(1024, price)
        loss = nn.functional.mse_loss(model(ids), y)
        optimizer.zero_grad()
        loss.backward()
        if i == 0:
            first = model.tokens.weight.grad[0].clone()
        optimizer.step()
        if i % 5 == 0:
            print(f"batch {i} loss {loss.item():.4f}")
    return first


torch.manual_seed(8)
first = main()
