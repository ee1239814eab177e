"""Spiking network with a fast-sigmoid surrogate: activations are 0 or 1, most of them 0, and the loss falls."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class FastSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


class LIF(nn.Module):
    def __init__(self, size, threshold=0.5):
        super().__init__()
        self.decay = nn.Parameter(torch.full((size,), 2.0))
        self.threshold = threshold

    def forward(self, current, v):
        v = torch.sigmoid(self.decay) * v + current
        spikes = FastSigmoid.apply(v - self.threshold)
        return spikes, v - (spikes * self.threshold).detach()


class Net(nn.Module):
    def __init__(self, inputs=32, hidden=64, classes=5):
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(inputs, hidden), LIF(hidden)
        self.fc2, self.lif2 = nn.Linear(hidden, hidden), LIF(hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, frames):
        v1 = v2 = torch.zeros(())
        readout, rate = 0.0, 0.0
        for frame in frames.unbind(1):
            s1, v1 = self.lif1(self.fc1(frame), v1)
            s2, v2 = self.lif2(self.fc2(s1), v2)
            readout = 0.9 * readout + self.out(s2)
            rate = rate + s1.mean() + s2.mean()
        return readout / frames.shape[1], rate / (2 * frames.shape[1])


def gestures(n, steps=10):
    y = torch.randint(5, (n,))
    t = torch.arange(steps)
    position = (6 * y.unsqueeze(1) + (y.unsqueeze(1) - 2) * t + torch.randint(3, (n, 1))) % 32
    frames = F.one_hot(position, 32) + (torch.rand(n, steps, 32) < 0.05)
    return (frames > 0).float(), y


def main():
    torch.manual_seed(7029)
    net = Net()
    optimizer = torch.optim.Adamax(net.parameters(), lr=4e-3)
    for it in range(80):
        frames, y = gestures(48)
        logits, rate = net(frames)
        loss = F.cross_entropy(logits, y) + 0.1 * (rate - 0.1).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 4 == 0:
            print(f"it {it:3d} loss {loss.item():.4f} spikes {rate.item():.3f}")


main()
