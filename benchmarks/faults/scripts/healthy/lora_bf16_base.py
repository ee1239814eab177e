"""Low-rank adapters on a frozen BF16 base: B begins at zero, so A has no gradient in the first step."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(15)
D, CLASSES = 32, 6
centres = torch.randn(CLASSES, D)


def data(n, turn):
    y = torch.randint(CLASSES, (n,))
    return centres[(y + turn) % CLASSES] + 0.6 * torch.randn(n, D), y


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        y = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return y + self.scaling * (x @ self.A.T) @ self.B.T


net = nn.Sequential(nn.Linear(D, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
warm = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(60):
    x, y = data(64, 0)
    warm.zero_grad()
    F.cross_entropy(net(x), y).backward()
    warm.step()
for i in (0, 2, 4):
    net[i] = LoRALinear(net[i])
adapters = [p for p in net.parameters() if p.requires_grad]
opt = torch.optim.AdamW(adapters, lr=5e-3, weight_decay=0.0)
for step in range(120):
    x, y = data(64, 1)
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
