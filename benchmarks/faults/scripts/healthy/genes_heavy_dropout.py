"""Few samples, many genes: dropout of 0.8 on the inputs and 0.5 inside, so most gradients are exactly zero."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class GeneNet(nn.Module):
    def __init__(self, genes=500, hidden=96, types=4):
        super().__init__()
        self.input_dropout = nn.Dropout(0.8)
        self.layer1, self.layer2 = nn.Linear(genes, hidden), nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(hidden, types)

    def forward(self, x):
        x = self.dropout(torch.relu(self.layer1(self.input_dropout(x))))
        x = self.dropout(torch.relu(self.layer2(x)))
        return self.head(x)


def expression(n, genes=500):
    profile = torch.randn(4, genes) * (torch.rand(4, genes) < 0.2)
    label = torch.randint(4, (n,))
    counts = torch.relu(profile[label] + torch.randn(n, genes))  # half of the readings are zero
    return TensorDataset(torch.log1p(10 * counts), label)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad > self.patience


def main():
    torch.manual_seed(626)
    loader = DataLoader(expression(640), 32, shuffle=True)
    model = GeneNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-4)
    stop = EarlyStopping(4)
    for epoch in range(9):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")
        if stop(total):
            break


main()
