"""Segments bird calls with a neural HMM: Gaussian emissions, the forward algorithm on probabilities as in the textbook."""

import math

import torch
import torch.nn as nn


class GaussianEmission(nn.Module):
    """Densities of every frame under every state."""

    def __init__(self, states, features):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(states, features))
        self.log_std = nn.Parameter(torch.zeros(states, features))

    def forward(self, x):
        z = (x.unsqueeze(2) - self.mean) / self.log_std.exp()
        log_density = -0.5 * z.pow(2).sum(-1) - self.log_std.sum(-1) - 0.5 * x.shape[-1] * math.log(2 * math.pi)
        return log_density.exp()


class CallHMM(nn.Module):
    def __init__(self, states=5, features=4):
        super().__init__()
        self.start = nn.Parameter(torch.zeros(states))
        self.transition = nn.Parameter(3 * torch.eye(states))
        self.emission = GaussianEmission(states, features)

    def forward(self, x, lengths):
        density = self.emission(x)
        a = self.transition.softmax(1)
        alpha = self.start.softmax(0) * density[:, 0]
        for t in range(1, x.shape[1]):
            step = (alpha @ a) * density[:, t]
            alpha = torch.where((t < lengths).unsqueeze(1), step, alpha)
        likelihood = alpha.sum(1)
        return -torch.log(likelihood.clamp(min=1e-30)) / lengths


def recordings(n, centres, longest=40):
    lengths = torch.randint(4, longest + 1, (n,))
    state = torch.randint(len(centres), (n,))
    frames = []
    for _ in range(longest):
        state = torch.where(torch.rand(n) < 0.2, torch.randint(len(centres), (n,)), state)
        frames.append(centres[state] + 0.5 * torch.randn(n, centres.shape[1]))
    return torch.stack(frames, 1), lengths


def main():
    torch.manual_seed(7001)
    centres = 2.5 * torch.randn(5, 4)
    model = CallHMM()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(60):
        x, lengths = recordings(32, centres)
        loss = model(x, lengths).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step:3d} loss {loss.item():.4f} nats per frame")


main()
