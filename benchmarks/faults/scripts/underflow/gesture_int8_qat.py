"""Quantisation-aware training of a small gesture classifier for a microcontroller: weights and activations on an INT8 grid."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def fake_quantize(x, bits=8):
    scale = x.detach().abs().amax().clamp(min=1e-8) / (2 ** (bits - 1) - 1)
    return torch.round(x / scale) * scale


class QuantLinear(nn.Linear):
    def forward(self, x):
        return F.linear(fake_quantize(x), fake_quantize(self.weight), self.bias)


class GestureNet(nn.Module):
    def __init__(self, window=48, classes=8):
        super().__init__()
        self.fc1 = QuantLinear(window, 64)
        self.bn1 = nn.BatchNorm1d(64)
        self.fc2 = QuantLinear(64, 32)
        self.bn2 = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, classes)  # stays in float

    def forward(self, x):
        x = F.relu(self.bn1(self.fc1(x)))
        x = F.relu(self.bn2(self.fc2(x)))
        return self.head(x)


def gestures(n, classes=8, window=48):
    y = torch.randint(classes, (n,))
    t = torch.linspace(0, 1, window)
    phase = 2 * torch.pi * torch.rand(n, 1)
    freq = (1 + (y % 4)).unsqueeze(1).float()
    sweep = (y // 4).unsqueeze(1).float()
    x = torch.sin(2 * torch.pi * freq * (t + sweep * t**2) + phase) + 0.2 * torch.randn(n, window)
    return TensorDataset(x, y)


def main():
    torch.manual_seed(7002)
    loader = DataLoader(gestures(1280), batch_size=64, shuffle=True)
    model = GestureNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(6):
        total, correct = 0.0, 0
        for i, (x, y) in enumerate(loader):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            correct += (logits.argmax(1) == y).sum().item()
            if i % 5 == 0:
                print(f"epoch {epoch} batch {i:2d} loss {loss.item():.4f}")
        print(f"epoch {epoch} mean {total / len(loader):.4f} accuracy {correct / 1280:.3f}")


main()
