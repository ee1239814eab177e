"""Remembers which symbol came first: an LSTM with chrono initialisation, the signs of the two gates' biases mixed up."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class FirstSymbol(nn.Module):
    def __init__(self, symbols=5, dim=16, hidden=40, horizon=60):
        super().__init__()
        self.embed = nn.Embedding(symbols + 1, dim)
        self.cell = nn.LSTMCell(dim, hidden)
        self.answer = nn.Linear(hidden, symbols)
        self.chrono(horizon)

    @torch.no_grad()
    def chrono(self, horizon):
        h = self.cell.hidden_size
        span = torch.empty(h).uniform_(1, horizon - 1).add(1).log()
        self.cell.bias_ih.zero_()
        self.cell.bias_hh.zero_()
        self.cell.bias_ih[h : 2 * h] = -span  # forget gate
        self.cell.bias_ih[:h] = span  # input gate

    def forward(self, tokens):
        return self.read(self.embed(tokens))

    def read(self, x):
        h = x.new_zeros(len(x), self.cell.hidden_size)
        c = torch.zeros_like(h)
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
        return self.answer(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=60)
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seed", type=int, default=402)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = FirstSymbol(horizon=args.length)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for step in range(args.steps):
        first = torch.randint(5, (48,))
        tokens = torch.full((48, args.length), 5)
        tokens[:, 0] = first
        tokens[:, 1:] = torch.where(torch.rand(48, args.length - 1) < 0.1, torch.randint(5, (48, args.length - 1)), 5)
        loss = F.cross_entropy(model(tokens), first)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 3 == 0:
            print(f"{step:4d} | loss {loss.item():.4f}")
    return model


if __name__ == "__main__":
    model = main()
