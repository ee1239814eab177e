"""Pollen grains by outline with a normaliser-free net and adaptive gradient clipping (AGC), in mixed precision."""

import torch
import torch.nn.functional as F
from torch import nn

CLIPPING = 0.02


def unitwise_norm(x):
    return x.norm() if x.dim() <= 1 else x.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1))


def adaptive_clip(parameters):
    for p in parameters:
        limit = CLIPPING * unitwise_norm(p.detach()).clamp_min(1e-3)
        norm = unitwise_norm(p.grad)
        p.grad.mul_(torch.where(norm > limit, limit / norm.clamp_min(1e-6), torch.ones_like(norm)))


class NFBlock(nn.Module):
    def __init__(self, c, beta):
        super().__init__()
        self.beta = beta
        self.conv1, self.conv2 = nn.Conv1d(c, c, 3, padding=1), nn.Conv1d(c, c, 3, padding=1)

    def forward(self, x):
        h = self.conv1(F.gelu(x * self.beta) * 1.7)
        return x + 0.2 * self.conv2(F.gelu(h) * 1.7)


class PollenNet(nn.Module):
    def __init__(self, c=24, species=8):
        super().__init__()
        self.stem = nn.Conv1d(1, c, 5, padding=2)
        self.blocks = nn.Sequential(*(NFBlock(c, (1 + 0.04 * i) ** -0.5) for i in range(3)))
        self.fc = nn.Linear(c, species)

    def forward(self, outline):
        return self.fc(F.gelu(self.blocks(self.stem(outline))).mean(-1))


def grains(n, shapes):
    kind = torch.randint(len(shapes), (n,))
    turned = torch.stack([shapes[k].roll(int(s)) for k, s in zip(kind.tolist(), torch.randint(32, (n,)))])
    return (turned + 0.3 * torch.randn(n, 32)).unsqueeze(1), kind


torch.manual_seed(19)
angle = torch.arange(32) * 2 * torch.pi / 32
shapes = torch.stack([(k // 2 + 1) ** 0.5 * torch.cos((k + 1) * angle) for k in range(8)])
model = PollenNet()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
for it in range(160):
    x, y = grains(32, shapes)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = F.cross_entropy(out.float(), y)
    scaler.scale(loss).backward()
    adaptive_clip(model.parameters())
    scaler.step(opt)
    scaler.update()
    if it % 8 == 7:
        print(f"iter {it + 1:3d} loss {loss.item():.4f}")
