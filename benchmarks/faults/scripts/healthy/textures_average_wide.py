"""BF16 weights rounded from FP32 masters, and a slow FP32 average of the masters that is used for evaluation."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class TextureNet(nn.Module):
    def __init__(self, classes=10, width=24):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, padding=2)
        self.depth, self.point = nn.Conv2d(width, width, 5, padding=2, groups=width), nn.Conv2d(width, width, 1)
        self.norm, self.head = nn.GroupNorm(6, width), nn.Linear(width, classes)

    def forward(self, x):
        x = F.gelu(self.stem(x))
        x = x + F.gelu(self.point(self.norm(self.depth(x))))
        return self.head(x.mean((2, 3)))


class Textures:
    def __init__(self, classes=10):
        self.waves = torch.randn(classes, 2) * 1.5
        self.tint = torch.randn(classes, 3, 1, 1)

    def batch(self, n, size=16):
        label = torch.randint(len(self.waves), (n,))
        y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        wave = self.waves[label][:, :, None, None]
        phase = 6.28 * torch.rand(n, 1, 1)
        pattern = torch.sin(wave[:, 0] * x + wave[:, 1] * y + phase)[:, None]
        return pattern * self.tint[label] + 0.6 * torch.randn(n, 3, size, size), label


@torch.no_grad()
def lerp(average, model, weight):
    for a, p in zip(average.parameters(), model.parameters()):
        a.lerp_(p.float(), weight)


torch.manual_seed(389)
textures, master = Textures(), TextureNet()
model, average = copy.deepcopy(master).to(torch.bfloat16), copy.deepcopy(master)
optimizer = torch.optim.AdamW(master.parameters(), lr=4e-3)
for step in range(120):
    image, label = textures.batch(32)
    loss = F.cross_entropy(model(image.to(torch.bfloat16)).float(), label)
    loss.backward()
    for p, m in zip(model.parameters(), master.parameters()):
        m.grad = p.grad.float()
        p.grad = None
    optimizer.step()
    with torch.no_grad():
        for p, m in zip(model.parameters(), master.parameters()):
            p.copy_(m)
    lerp(average, master, 0.002)
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
