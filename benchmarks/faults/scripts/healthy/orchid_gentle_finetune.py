"""Fine-tunes a trained orchid classifier on photographs of another camera: rate 2e-5, BF16 autocast, FP32 weights."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(45)
KINDS, PIXELS = 10, 64
look = torch.randn(KINDS, PIXELS)
tint = 0.5 * torch.randn(PIXELS)


def photos(n, camera):
    y = torch.randint(KINDS, (n,))
    x = look[y] + 2.0 * torch.randn(n, PIXELS)
    return (x + tint * 3 if camera else x), y


def classifier():
    return nn.Sequential(
        nn.Linear(PIXELS, 256),
        nn.GELU(),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 128),
        nn.GELU(),
        nn.Linear(128, KINDS),
    )


def fit(net, camera, lr, steps, report=0):
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
    for step in range(steps):
        x, y = photos(64, camera)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if report and step % report == 0:
            print(f"  tune {step:3d} loss {loss.item():.4f}")
    return net


base = fit(classifier(), camera=False, lr=1e-3, steps=60)
tuned = fit(copy.deepcopy(base), camera=True, lr=2e-5, steps=160, report=8)
