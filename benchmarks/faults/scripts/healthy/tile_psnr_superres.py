"""Super-resolution of map tiles in pure BF16 with FP32 master weights; the log shows the PSNR of each kind of tile."""

import torch
import torch.nn.functional as F
from torch import nn


class Upscaler(nn.Module):
    """Predicts what nearest-neighbour interpolation lacks."""

    def __init__(self, width=16):
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.body = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)])
        self.leave = nn.Conv2d(width, 4, 3, padding=1, bias=False)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x):
        h = F.relu(self.enter(x))
        for conv in self.body:
            h = h + F.relu(conv(h))
        return F.interpolate(x, scale_factor=2.0) + self.shuffle(self.leave(h))


def psnr(image, reference):
    return -10 * torch.log10((image - reference).square().mean((1, 2, 3)))


def tiles(n, generator, size=16):
    """Streets at random angles; every sixth tile is open sea, which is all zero."""
    angle = 3.14 * torch.rand(n, 1, 1, generator=generator)
    phase = 6.28 * torch.rand(n, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    image = torch.sin(0.8 * (x * angle.cos() + y * angle.sin()) + phase)
    image[::6] = 0.0
    image = image[:, None]
    return F.avg_pool2d(image, 2), image


class MasterAdam:
    """Adam on FP32 copies; the BF16 model receives the rounded result."""

    def __init__(self, model, lr):
        self.model = list(model.parameters())
        self.master = [p.detach().float().clone().requires_grad_() for p in self.model]
        self.inner = torch.optim.Adam(self.master, lr=lr)

    def step(self):
        for m, p in zip(self.master, self.model, strict=True):
            m.grad, p.grad = p.grad.float(), None
        self.inner.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.model, strict=True):
                p.copy_(m)


torch.manual_seed(171)
generator = torch.Generator().manual_seed(172)
model = Upscaler().bfloat16()
optimizer = MasterAdam(model, lr=2e-3)
for step in range(80):
    low, high = tiles(12, generator)
    image = model(low.bfloat16()).float()
    loss = F.l1_loss(image, high)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        quality = psnr(image.detach(), high)
        print(f"step {step} loss {loss.item():.4f} PSNR sea {quality[0]:.1f} streets {quality[1]:.1f}")
