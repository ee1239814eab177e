"""Recognises gestures with an FP16 network, FP32 masters and a constant loss scale; unscaling happens in FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F

SCALE = 1024.0


class GestureNet(nn.Module):
    def __init__(self, channels=6, width=40, classes=9):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(channels, width, 7, 2, 3), nn.Conv1d(width, width, 7, 2, 3)
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return self.fc2(F.relu(self.fc1(x.mean(-1))))


class FP16Optimizer:
    def __init__(self, model, make):
        self.half = list(model.parameters())
        self.single = [nn.Parameter(p.detach().float()) for p in self.half]
        self.inner, self.skipped = make(self.single), 0

    def backward(self, loss):
        (loss * SCALE).backward()

    @torch.no_grad()
    def step(self):
        for p, s in zip(self.half, self.single):
            s.grad = p.grad.float() / SCALE
            p.grad = None
        norm = nn.utils.clip_grad_norm_(self.single, 5.0)
        if bool(norm.isfinite()):
            self.inner.step()
        else:
            self.skipped += 1
        for p, s in zip(self.half, self.single):
            p.copy_(s)


def gestures(n, directions, length=64):
    label = torch.randint(len(directions), (n,))
    t = torch.linspace(-1, 1, length)
    stroke = torch.exp(-((t / 0.4) ** 2)) * torch.sin(5 * t + 0.5 * torch.randn(n, 1))
    return directions[label][:, :, None] * stroke[:, None] + 0.3 * torch.randn(n, 6, length), label


torch.manual_seed(379)
directions = torch.randn(9, 6)
model = GestureNet().half()
optimizer = FP16Optimizer(model, lambda params: torch.optim.Adam(params, lr=3e-3))
for step in range(160):
    x, label = gestures(32, directions)
    loss = F.cross_entropy(model(x.half()).float(), label)
    optimizer.backward(loss)
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
