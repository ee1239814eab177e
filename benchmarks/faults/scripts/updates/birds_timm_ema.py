"""Bird photos, the small net of the tutorial with ModelEmaV2 as in timm; the copy is kept in BF16 to save memory."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(61)
EMA_DTYPE = torch.bfloat16


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.998):
        super().__init__()
        self.module = deepcopy(model).eval().to(EMA_DTYPE)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.parameters(), model.parameters()):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v.to(ema_v.dtype))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.GroupNorm(1, dim)
        self.pw1, self.pw2 = nn.Conv2d(dim, 4 * dim, 1), nn.Conv2d(4 * dim, dim, 1)

    def forward(self, x):
        return x + self.pw2(F.gelu(self.pw1(self.norm(self.dw(x)))))


class ConvNeXtTiny(nn.Module):
    def __init__(self, dim=24, classes=6):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, stride=4)
        self.stages = nn.Sequential(Block(dim), Block(dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


plumage = torch.randn(6, 3, 24, 24)


def batch(n):
    y = torch.randint(6, (n,))
    return 0.5 * plumage[y] + torch.randn(n, 3, 24, 24), y


model = ConvNeXtTiny()
model_ema = ModelEmaV2(model)
start = deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
val_x, val_y = batch(256)
for it in range(400):
    x, y = batch(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model_ema.update(model)
    if it % 20 == 19:
        with torch.no_grad():
            val = F.cross_entropy(model_ema.module(val_x.to(EMA_DTYPE)).float(), val_y)
        print(f"iter {it + 1} train {loss.item():.3f} EMA loss {val.item():.4f}")
