"""Which films a visitor would book: embedding tables with Adagrad, the dense part with AdamW."""

import torch
import torch.nn.functional as F
from torch import nn


class SeatTaste(nn.Module):
    def __init__(self, visitors=400, films=120, dim=16):
        super().__init__()
        self.visitors = nn.Embedding(visitors, dim)
        self.films = nn.Embedding(films, dim)
        self.deep = nn.Sequential(nn.Linear(2 * dim + 4, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))
        for table in (self.visitors, self.films):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, visitor, film, context):
        v, f = self.visitors(visitor), self.films(film)
        return (v * f).sum(1) + self.deep(torch.cat([v, f, context], 1)).squeeze(1)


class Bookings:
    def __init__(self, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.taste = torch.randn(400, 4, generator=self.g)
        self.style = torch.randn(120, 4, generator=self.g)

    def draw(self, size=512):
        visitor = torch.randint(0, 400, (size,), generator=self.g)
        film = (120 * torch.rand(size, generator=self.g) ** 2).long()
        context = torch.randn(size, 4, generator=self.g)
        score = (self.taste[visitor] * self.style[film]).sum(1) + context[:, 0]
        return visitor, film, context, torch.bernoulli(torch.sigmoid(1.5 * score), generator=self.g)


def main(steps=400):
    torch.manual_seed(2)
    model, bookings = SeatTaste(), Bookings()
    tables = [model.visitors.weight, model.films.weight]
    sparse_optimizer = torch.optim.Adagrad(tables, lr=0.05)
    dense_optimizer = torch.optim.AdamW(model.deep.parameters(), lr=2e-3, weight_decay=1e-2)
    recent = []
    for step in range(steps):
        visitor, film, context, booked = bookings.draw()
        loss = F.binary_cross_entropy_with_logits(model(visitor, film, context), booked)
        dense_optimizer.zero_grad()
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()
        recent.append(loss.item())
        if step % 20 == 19:
            print(f"step {step + 1} loss {sum(recent[-20:]) / 20:.4f}")
    return model


if __name__ == "__main__":
    model = main()
