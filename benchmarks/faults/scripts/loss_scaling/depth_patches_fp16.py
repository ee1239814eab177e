"""Relative depth from patches: a small ViT decoder, gradients accumulated over four micro-batches, FP16 autocast."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(77)
SIDE, PATCH, ACCUM = 32, 4, 4
GRID = SIDE // PATCH


def scenes(n):
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    a = torch.randn(n, 3, 1, 1)
    depth = 0.5 + 0.1 * (a[:, 0] * x + a[:, 1] * y + a[:, 2] * x * y)
    albedo = 0.5 + 0.1 * torch.rand(n, 1, 1)
    image = torch.stack([albedo / (depth.abs() + 0.3), depth + 0.02 * torch.randn(n, SIDE, SIDE)], 1)
    return image, depth.unsqueeze(1)


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class DepthViT(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.patch = nn.Linear(2 * PATCH * PATCH, d)
        self.pos = nn.Parameter(0.02 * torch.randn(GRID * GRID, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, PATCH * PATCH)

    def forward(self, image):
        x = F.unfold(image, PATCH, stride=PATCH).transpose(1, 2)
        x = self.patch(x) + self.pos
        for block in self.blocks:
            x = block(x)
        x = self.out(self.norm(x))
        return F.fold(x.transpose(1, 2), (SIDE, SIDE), PATCH, stride=PATCH)


model = DepthViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for update in range(40):
    total = 0.0
    for _ in range(ACCUM):
        image, depth = scenes(8)
        with torch.autocast("cpu", dtype=torch.float16, enabled=True):
            pred = model(image)
        # metres of indoor scenes; the weight is that of the depth term beside normals and edges
        loss = 0.005 * F.mse_loss(pred.float(), depth)
        (loss / ACCUM).backward()
        total += 200 * loss.item() / ACCUM
    optimizer.step()
    optimizer.zero_grad()
    print(f"update {update}: loss {total:.6f}")
