"""Quantization-aware fine-tuning of a keyword classifier: observers learn activation ranges, then INT8 is simulated."""

import math

import torch
from torch import nn


class RangeObserver(nn.Module):
    """Smallest and largest value so far; empty until the first batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(math.inf))
        self.register_buffer("high", torch.tensor(-math.inf))

    def forward(self, x):
        if self.training:
            self.low.copy_(torch.minimum(self.low, x.detach().amin()))
            self.high.copy_(torch.maximum(self.high, x.detach().amax()))
        return x

    def quantize(self, x):
        low, high = self.low.clamp(max=0.0), self.high.clamp(min=0.0)
        scale = ((high - low) / 255).clamp(min=1e-8)
        zero = torch.round(-low / scale)
        q = (torch.round(x / scale + zero).clamp(0, 255) - zero) * scale
        return x + (q - x).detach()


class QuantLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.observer = RangeObserver()
        self.simulate = False

    def forward(self, x):
        x = self.observer(x)
        weight = self.linear.weight
        if self.simulate:
            x = self.observer.quantize(x)
            scale = weight.detach().abs().amax(1, keepdim=True) / 127
            weight = weight + (torch.round(weight / scale) * scale - weight).detach()
        return nn.functional.linear(x, weight, self.linear.bias)


class KeywordNet(nn.Module):
    def __init__(self, features=20, width=48, classes=6):
        super().__init__()
        self.layers = nn.Sequential(
            QuantLinear(features, width), nn.ReLU(), QuantLinear(width, width), nn.ReLU(), QuantLinear(width, classes)
        )

    def simulate(self, on):
        for layer in self.layers:
            if isinstance(layer, QuantLinear):
                layer.simulate = on

    def forward(self, x):
        return self.layers(x)


def words(n, centres, generator):
    label = torch.randint(0, len(centres), (n,), generator=generator)
    return centres[label] + 1.2 * torch.randn(n, centres.shape[1], generator=generator), label


def main():
    torch.manual_seed(131)
    generator = torch.Generator().manual_seed(132)
    centres = torch.randn(6, 20, generator=generator)
    model = KeywordNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    best, patience = math.inf, 0
    for epoch in range(12):
        model.simulate(epoch >= 3)
        model.train()
        for _ in range(12):
            x, y = words(32, centres, generator)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = words(256, centres, generator)
            validation = nn.functional.cross_entropy(model(x), y).item()
        print(f"epoch {epoch} loss {loss.item():.4f} validation {validation:.4f} (best {best:.4f})")
        best, patience = (validation, 0) if validation < best else (best, patience + 1)
        if patience == 6:
            break


if __name__ == "__main__":
    main()
