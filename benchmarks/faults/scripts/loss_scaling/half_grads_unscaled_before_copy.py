"""FP16 model, FP32 masters, a static loss scale; gradients are divided by the scale while they are still FP16."""

import torch
import torch.nn as nn
import torch.nn.functional as F

SCALE = 4096.0


class Denoiser(nn.Module):
    def __init__(self, size=64, hidden=128):
        super().__init__()
        self.enc = nn.Linear(size, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.dec = nn.Linear(hidden, size)

    def forward(self, x):
        h = F.silu(self.enc(x))
        h = h + F.silu(self.mid(h))
        return self.dec(h)


def signals(n, size=64):
    t = torch.linspace(0, 1, size)
    clean = torch.sin(6.28 * (1 + 4 * torch.rand(n, 1)) * t + 6.28 * torch.rand(n, 1))
    return 0.001 * clean, 0.001 * (clean + 0.5 * torch.randn(n, size))


def unscale_and_copy(model, masters):
    for p, master in zip(model.parameters(), masters, strict=True):
        p.grad.data.div_(SCALE)
        master.grad = p.grad.float()


torch.manual_seed(2123)
model = Denoiser().half()
masters = [p.detach().clone().float() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=1e-3)
for step in range(200):
    clean, noisy = signals(64)
    loss = F.mse_loss(model(noisy.half()).float(), clean)
    model.zero_grad()
    (loss * SCALE).backward()
    unscale_and_copy(model, masters)
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4e}")
