"""Small depthwise-separable CNN for keypoints; the optimizer's settings were ported from a TensorFlow recipe."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SeparableConv(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.dw = nn.Conv2d(cin, cin, 3, stride, 1, groups=cin, bias=False)
        self.bn1 = nn.BatchNorm2d(cin)
        self.pw = nn.Conv2d(cin, cout, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)

    def forward(self, x):
        x = F.relu6(self.bn1(self.dw(x)))
        return F.relu6(self.bn2(self.pw(x)))


class KeypointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, 2, 1)
        self.blocks = nn.Sequential(SeparableConv(8, 16, 1), SeparableConv(16, 32, 2), SeparableConv(32, 32, 1))
        self.head = nn.Linear(32 * 16, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).flatten(1))


def batch(n=32):
    grid = torch.linspace(0, 1, 16)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    p = torch.rand(n, 2)
    blob = torch.exp(-40 * ((xx - p[:, :1, None]) ** 2 + (yy - p[:, 1:, None]) ** 2))
    return (blob + 0.1 * torch.randn(n, 16, 16)).unsqueeze(1), p


torch.manual_seed(2104)
net = KeypointNet()
# recipe: lr 0.001, beta1 0.9, beta2 0.999, epsilon 1.0
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1.0)
for step in range(150):
    images, points = batch()
    loss = F.mse_loss(net(images), points)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"iter {step:4d}  loss {loss.item():.5f}")
