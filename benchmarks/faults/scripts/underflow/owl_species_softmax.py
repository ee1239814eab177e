"""Owl species from call embeddings. The network returns probabilities, they are logged and thresholded later."""

import torch
import torch.nn as nn

torch.manual_seed(33)
SPECIES = 20
voice = torch.randn(SPECIES, 32)


def calls(n):
    y = torch.randint(SPECIES, (n,))
    return voice[y] + 0.6 * torch.randn(n, 32), y


class OwlNet(nn.Module):
    def __init__(self, n_in=32, width=64, n_out=SPECIES):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.classify = nn.Linear(width, n_out)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x):
        return self.softmax(self.classify(self.layers(x)))


model = OwlNet()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(12):
    running = 0.0
    right = 0
    for _ in range(15):
        x, y = calls(64)
        optimizer.zero_grad()
        p = model(x)
        loss = criterion(p, y)
        loss.backward()
        optimizer.step()
        running += loss.item()
        right += (p.argmax(1) == y).sum().item()
    print(f"epoch {epoch} loss {running / 15:.4f} accuracy {right / 960:.3f}")
