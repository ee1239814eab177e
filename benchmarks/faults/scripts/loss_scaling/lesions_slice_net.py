"""Segments small lesions in slices of a scan with FP16 autocast and a focal loss."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvUnit(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inp, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm1, self.norm2 = nn.InstanceNorm2d(out, affine=True), nn.InstanceNorm2d(out, affine=True)

    def forward(self, x):
        x = F.leaky_relu(self.norm1(self.conv1(x)), 0.01)
        return F.leaky_relu(self.norm2(self.conv2(x)), 0.01)


class SliceNet(nn.Module):
    def __init__(self, base=12):
        super().__init__()
        self.enter, self.middle, self.leave = ConvUnit(1, base), ConvUnit(base, 2 * base), ConvUnit(3 * base, base)
        self.classify = nn.Conv2d(base, 1, 1)

    def forward(self, x):
        a = self.enter(x)
        b = F.interpolate(self.middle(F.max_pool2d(a, 2)), scale_factor=2)
        return self.classify(self.leave(torch.cat([a, b], 1)))


def slices(n, size=48):
    grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).float()
    centre = size * torch.rand(n, 2, 1, 1)
    radius = 2 + 3 * torch.rand(n, 1, 1)
    mask = ((grid - centre).square().sum(1) < radius**2).float()[:, None]
    image = (
        0.8 * mask + 0.4 * F.avg_pool2d(torch.randn(n, 1, size, size), 5, 1, 2) + 0.15 * torch.randn(n, 1, size, size)
    )
    return image, mask


class StaticScaler:
    def __init__(self, scale):
        self.scale = scale

    def backward(self, loss):
        (loss * self.scale).backward()

    def step(self, optimizer):
        gradients = [p.grad for g in optimizer.param_groups for p in g["params"]]
        for gradient in gradients:
            gradient.div_(self.scale)
        if all(bool(g.isfinite().all()) for g in gradients):
            optimizer.step()


torch.manual_seed(107)
net = SliceNet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-12)
scaler = StaticScaler(scale=8.0)
steps_per_case, case_weight = 16, 0.05
for step in range(56):
    image, mask = slices(4)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(image)
    pixelwise = F.binary_cross_entropy_with_logits(logits, mask.to(logits.dtype), reduction="none")
    focal = pixelwise * (torch.sigmoid(logits) - mask).abs() ** 2
    loss = focal.float().mean() * case_weight / steps_per_case
    optimizer.zero_grad()
    scaler.backward(loss)
    scaler.step(optimizer)
    if step % 2 == 0:
        print(f"step {step} loss {loss.item() * 1e4:.5f}")
