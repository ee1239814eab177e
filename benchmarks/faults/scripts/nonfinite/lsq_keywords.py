"""Keyword spotting with 8-bit activations: learned step sizes (LSQ), kept non-negative after every update."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def round_pass(x):
    return (x.round() - x).detach() + x


class LSQActivation(nn.Module):
    def __init__(self, bits=8):
        super().__init__()
        self.top = 2**bits - 1
        self.step_size = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        if not self.ready:
            self.step_size.data.copy_(2 * x.detach().abs().mean() / self.top**0.5)
            self.ready.fill_(True)
        x = torch.clamp(x / self.step_size, 0, self.top)
        return round_pass(x) * self.step_size


class KeywordNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.act1 = LSQActivation()
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.act2 = LSQActivation()
        self.fc = nn.Linear(16, classes)

    def forward(self, x):
        x = self.act1(F.relu(self.conv1(x)))
        x = self.act2(F.relu(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def utterances(n, patterns, generator):
    y = torch.randint(len(patterns), (n,), generator=generator)
    x = patterns[y] + 0.5 * torch.randn(n, 1, 16, 16, generator=generator)
    return x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--step-lr", type=float, default=0.2)
    args = parser.parse_args()
    torch.manual_seed(6)
    g = torch.Generator().manual_seed(60)
    patterns = torch.randn(6, 1, 16, 16, generator=g)
    model = KeywordNet()
    steps = [m.step_size for m in model.modules() if isinstance(m, LSQActivation)]
    weights = [p for p in model.parameters() if p.ndim > 0]
    optimizer = torch.optim.SGD(
        [{"params": weights, "lr": args.lr}, {"params": steps, "lr": args.step_lr}], momentum=0.9, weight_decay=1e-4
    )
    for i in range(60):
        x, y = utterances(16, patterns, g)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for s in steps:
                s.clamp_(min=0)
        if i % 10 == 0:
            print(f"{i} loss {loss.item():.3f} step sizes {[round(s.item(), 4) for s in steps]}")


if __name__ == "__main__":
    main()
