"""Monocular depth from small images in FP16 autocast, without a loss scaler: the gradient of a mean over many pixels."""

import torch
from torch import nn


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), nn.ELU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ELU())
        self.decoder = nn.Sequential(nn.Upsample(scale_factor=4), nn.Conv2d(24, 12, 3, padding=1), nn.ELU())
        self.head = nn.Conv2d(12, 1, 1)

    def forward(self, image):
        return self.head(self.decoder(self.encoder(image)))


def scenes(n, size=64):
    plane = torch.linspace(0, 1, size).expand(n, 1, size, size)
    image = torch.cat([plane, plane**2, torch.rand(n, 1, size, size)], 1)
    return image, plane + 0.05 * torch.randn_like(plane)


def silog(predicted, truth, weight=1e-3):
    """The depth term is one of five; its weight is small."""
    d = predicted.float() - truth
    return weight * (d.square().mean() - 0.5 * d.mean() ** 2)


torch.manual_seed(0)
net = DepthNet()
optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
for step in range(10):
    image, truth = scenes(4)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = net(image)
    loss = silog(predicted, truth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"loss {loss.item():.3e}")
