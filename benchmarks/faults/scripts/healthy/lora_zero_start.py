"""LoRA in FP32 beside a frozen BF16 network: B is zero at first, so that A gets no gradient in the first step."""

import torch
import torch.nn.functional as F
from torch import nn


class Adapter(nn.Module):
    def __init__(self, base, r=4):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, r, bias=False), nn.Linear(r, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + 2 * self.up(self.down(x))


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 48), nn.Linear(48, 48), nn.Linear(48, 6)

    def forward(self, x):
        return self.c(F.gelu(self.b(F.gelu(self.a(x)))))


def train():
    torch.manual_seed(3208)
    model, centres = Frozen(), torch.randn(6, 12)
    for name in ("a", "b", "c"):
        setattr(model, name, Adapter(getattr(model, name)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=8e-3)
    for step in range(60):
        y = torch.randint(0, 6, (48,))
        loss = F.cross_entropy(model(centres[y] + 0.5 * torch.randn(48, 12)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")


train()
