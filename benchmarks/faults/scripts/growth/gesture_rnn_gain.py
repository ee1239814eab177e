"""Recognises gestures from wrist accelerometers with a recurrent network written out by hand."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


def gestures(n, length, generator):
    """Three axes; the class is the order of two strokes and their axis."""
    y = torch.randint(6, (n,), generator=generator)
    axis, order = y % 3, y // 3
    t = torch.arange(length).float()
    first, second = 0.25 * length, 0.7 * length
    early = torch.exp(-(((t - first) / 3) ** 2))
    late = torch.exp(-(((t - second) / 3) ** 2))
    stroke = torch.where(order[:, None] == 0, early - late, late - early)
    x = 0.3 * torch.randn(n, length, 3, generator=generator)
    x[torch.arange(n), :, axis] += 1.5 * stroke
    return x, y


class GestureRNN(nn.Module):
    def __init__(self, hidden, gain):
        super().__init__()
        self.inp = nn.Linear(3, hidden)
        self.rec = nn.Linear(hidden, hidden, bias=False)
        self.out = nn.Linear(hidden, 6)
        nn.init.orthogonal_(self.rec.weight, gain=gain)

    def forward(self, x):
        h = x.new_zeros(len(x), self.rec.in_features)
        for step in self.inp(x).unbind(1):
            h = torch.tanh(step + self.rec(h))
        return self.out(h)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--gain", type=float, default=2.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(73)
    generator = torch.Generator().manual_seed(73)
    x, y = gestures(1024, args.length, generator)
    model = GestureRNN(args.hidden, args.gain)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        idx = torch.randint(len(x), (64,), generator=generator)
        logits = model(x[idx])
        loss = F.cross_entropy(logits, y[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 8 == 7:
            acc = (logits.argmax(1) == y[idx]).float().mean().item()
            print(f"step {step + 1} loss {loss.item():.4f} acc {acc:.3f}")
