import torch
from torch import nn
from torch.nn import functional as F


class Grader(nn.Module):
    """Grades cocoa beans from near-infrared spectra."""

    def __init__(self, bands=64, grades=4):
        super().__init__()
        self.conv = nn.Conv1d(1, 12, 7, stride=2, padding=3)
        self.conv2 = nn.Conv1d(12, 24, 5, stride=2, padding=2)
        self.fc = nn.Linear(24 * bands // 4, grades)

    def forward(self, s):
        h = F.relu(self.conv(s.unsqueeze(1)))
        h = F.relu(self.conv2(h))
        return self.fc(h.flatten(1))


def spectra(base, n):
    y = torch.randint(len(base), (n,))
    tilt = torch.linspace(-1, 1, base.shape[1]) * torch.randn(n, 1)
    return base[y] + 0.5 * tilt + 0.7 * torch.randn(n, base.shape[1]), y


def train_one(model, optimizer, batches):
    model.train()
    for i, (s, y) in enumerate(batches):
        loss = F.cross_entropy(model(s), y)
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"  batch {i} loss {loss.item():.4f}")


def main():
    torch.manual_seed(13)
    base = torch.randn(4, 64).cumsum(1) * 0.3
    model = Grader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        print("epoch", epoch)
        train_one(model, optimizer, [spectra(base, 32) for _ in range(50)])


if __name__ == "__main__":
    main()
