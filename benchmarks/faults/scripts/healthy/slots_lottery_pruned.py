"""Magnitude pruning to 90 % zeros half-way; the masked weights have no gradient from then on."""

import torch
from torch import nn
from torch.nn.utils import prune


class Slots(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(30, 128), nn.Linear(128, 128), nn.Linear(128, classes)

    def forward(self, x):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def main():
    torch.manual_seed(124)
    centres = torch.randn(8, 30)
    model = Slots()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(240):
        if step in (80, 120, 160):
            layers = [(model.fc1, "weight"), (model.fc2, "weight")]
            prune.global_unstructured(layers, prune.L1Unstructured, amount=0.55)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        y = torch.randint(8, (64,))
        x = centres[y] + 1.2 * torch.randn(64, 30)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
