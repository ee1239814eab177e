"""Leaky integrate-and-fire network on event-camera blobs: boxcar surrogate, rate-coded input."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad * (v.abs() < 0.25).to(grad.dtype) * 2.0


class LIF(nn.Module):
    def __init__(self, beta=0.8, threshold=1.0):
        super().__init__()
        self.beta, self.threshold = beta, threshold

    def forward(self, current, v):
        v = self.beta * v + current
        spikes = Spike.apply(v - self.threshold)
        return spikes, v - spikes * self.threshold


class SpikingNet(nn.Module):
    def __init__(self, pixels=64, classes=6):
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(pixels, 96), LIF()
        self.fc2, self.lif2 = nn.Linear(96, 64), LIF()
        self.readout = nn.Linear(64, classes)

    def forward(self, events):
        v1 = v2 = torch.zeros(())
        out = 0.0
        for frame in events:
            s1, v1 = self.lif1(self.fc1(frame), v1)
            s2, v2 = self.lif2(self.fc2(s1), v2)
            out = out + self.readout(s2)
        return out / len(events)


def events(n, patterns, steps=12, rate=0.15):
    y = torch.randint(len(patterns), (n,))
    p = patterns[y] * rate + 0.01
    return (torch.rand(steps, n, patterns.shape[1]) < p).float(), y


def main():
    torch.manual_seed(7003)
    patterns = (torch.rand(6, 64) < 0.3).float()
    net = SpikingNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for it in range(80):
        x, y = events(64, patterns)
        logits = net(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 5 == 0:
            print(f"it {it:3d} loss {loss.item():.4f} acc {(logits.argmax(1) == y).float().mean().item():.2f}")


main()
