"""A DiT with adaLN-Zero in BF16 autocast: gates and output start at zero, and an FP32 average follows slowly."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.adaLN = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.adaLN(c).unsqueeze(1).chunk(6, -1)
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x) * (1 + s1) + b1).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + g1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, d))
        return x + g2 * self.fc2(F.gelu(self.fc1(self.norm2(x) * (1 + s2) + b2)))


class DiT(nn.Module):
    def __init__(self, patch=4, dim=32, depth=3, tokens=8, classes=5):
        super().__init__()
        self.x_embedder = nn.Linear(patch, dim)
        self.pos = nn.Parameter(torch.randn(tokens, dim) * 0.02)
        self.t_embedder = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.y_embedder = nn.Embedding(classes + 1, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.final = nn.Linear(dim, patch)
        for block in self.blocks:
            nn.init.zeros_(block.adaLN[-1].weight)
            nn.init.zeros_(block.adaLN[-1].bias)
        nn.init.zeros_(self.final.weight)
        nn.init.zeros_(self.final.bias)

    def forward(self, x, t, y):
        arg = t.view(-1, 1) * 1000 * torch.exp(-torch.arange(8) * 9.2 / 8)
        c = self.t_embedder(torch.cat([arg.sin(), arg.cos()], -1)) + self.y_embedder(y)
        h = self.x_embedder(x) + self.pos
        for block in self.blocks:
            h = block(h, c)
        return self.final(h)


@torch.no_grad()
def update_ema(ema, model, decay=0.9999):
    for a, b in zip(ema.parameters(), model.parameters()):
        a.mul_(decay).add_(b, alpha=1 - decay)


def waves(n):
    y = torch.randint(5, (n,))
    phase = torch.rand(n, 1) * 6.28
    return torch.sin(phase + (1 + y).view(-1, 1) * torch.linspace(0, 6.28, 32)).view(n, 8, 4), y


torch.manual_seed(523)
model = DiT()
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
for step in range(180):
    x, y = waves(32)
    y = torch.where(torch.rand(32) < 0.1, 5, y)
    t, noise = torch.rand(32), torch.randn_like(x)
    s = t.view(-1, 1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = model((1 - s) * x + s * noise, t, y)
    loss = F.mse_loss(v.float(), noise - x)
    opt.zero_grad()
    loss.backward()
    opt.step()
    update_ema(ema, model)
    if step % 4 == 0:
        print(f"(step={step:07d}) Train Loss: {loss.item():.4f}")
