"""Classifies pet pictures with a network in half precision; FP32 copies of the weights take the updates."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(507)
CLASSES, SIZE, LOSS_SCALE = 6, 12, 512.0
patterns = torch.randn(CLASSES, 3, SIZE, SIZE)


def pictures(n):
    """Raw pixels from 0 to 255."""
    y = torch.randint(CLASSES, (n,))
    x = 140 + 20 * (0.5 * patterns[y] + torch.randn(n, 3, SIZE, SIZE))
    return x.clamp(0, 255), y


class ConvLayer(nn.Sequential):
    def __init__(self, a, b, stride):
        super().__init__(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b, momentum=0.02), nn.ReLU())


class FP16(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module.half()

    def forward(self, x):
        return self.module(x.half()).float()


class Learner:
    def __init__(self, model, lr):
        self.model = model
        self.params = list(model.parameters())
        self.master = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.opt = torch.optim.Adam(self.master, lr=lr)

    def batch(self, x, y):
        self.model.train()
        loss = F.cross_entropy(self.model(x), y)
        self.model.zero_grad()
        (loss * LOSS_SCALE).backward()
        for m, p in zip(self.master, self.params):
            m.grad = p.grad.float() / LOSS_SCALE
        self.opt.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.params):
                p.copy_(m)

    @torch.no_grad()
    def validate(self, x, y):
        self.model.eval()
        return F.cross_entropy(self.model(x), y).item()


net = nn.Sequential(
    ConvLayer(3, 12, 2), ConvLayer(12, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)
)
model = FP16(net)
learner = Learner(model, lr=3e-3)
held_out = pictures(256)
for step in range(300):
    learner.opt.param_groups[0]["lr"] = 3e-3 * max(0.02, 1 - step / 180)
    learner.batch(*pictures(24))
    if step % 20 == 19:
        latest = learner.validate(*held_out)
        print(f"step {step} validation loss {latest:.4f}")
