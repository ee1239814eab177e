"""Keypoint heat maps; convolutions cast what comes back to E4M3 with the scale of the forward, which is near one."""

import torch
import torch.nn.functional as F
from torch import nn

TOP = 448.0


def e4m3(x, scale):
    return (x * scale).clamp(-TOP, TOP).to(torch.float8_e4m3fn).to(x.dtype) / scale


class Gradient8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, scale):
        ctx.scale = scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return e4m3(grad, ctx.scale), None


class Conv8(nn.Conv2d):
    def forward(self, x):
        scale = TOP / x.detach().abs().max().clamp(min=1e-6)
        scale = torch.exp2(torch.floor(torch.log2(scale)))
        x8 = x + (e4m3(x.detach(), scale) - x.detach())
        y = F.conv2d(x8, self.weight, self.bias, self.stride, self.padding)
        return Gradient8.apply(y, scale)


class Heatmaps(nn.Module):
    def __init__(self, joints=3, dim=16):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 3, padding=1)
        self.conv1, self.norm1 = Conv8(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.conv2, self.norm2 = Conv8(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.head = nn.Conv2d(dim, joints, 1)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + F.relu(self.norm1(self.conv1(x)))
        x = x + F.relu(self.norm2(self.conv2(x)))
        return self.head(x)


def figures(n, size=24):
    where = torch.rand(n, 3, 2) * (size - 6) + 3
    axis = torch.arange(size).float()
    dy = axis.view(1, 1, -1, 1) - where[..., 0, None, None]
    dx = axis.view(1, 1, 1, -1) - where[..., 1, None, None]
    maps = torch.exp(-(dx**2 + dy**2) / 4)
    image = (maps * torch.tensor([1.0, -1.0, 0.5]).view(1, 3, 1, 1)).sum(1, keepdim=True)
    return image + 0.05 * torch.randn_like(image), maps


torch.manual_seed(9)
model = Heatmaps()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(80):
    image, maps = figures(16)
    loss = F.mse_loss(model(image), maps)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.5f}")
