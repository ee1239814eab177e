"""LoRA (rank 4, B starts at zero) on a frozen bowing classifier in bfloat16; adapters stay in float32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(203)
BOWINGS, DIM = 5, 40
strokes = torch.randn(BOWINGS, DIM)


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=16):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        low = F.linear(F.linear(x, self.a), self.b)
        return self.base(x.to(torch.bfloat16)).to(x.dtype) + self.scale * low


def recordings(n, violin):
    y = torch.randint(BOWINGS, (n,))
    x = strokes[y] + 1.2 * torch.randn(n, DIM)
    return (x.roll(7, 1) if violin == "baroque" else x), y


base = nn.Sequential(nn.Linear(DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, BOWINGS))
opt = torch.optim.Adam(base.parameters(), lr=2e-3)
for _ in range(60):
    x, y = recordings(64, "modern")
    opt.zero_grad()
    F.cross_entropy(base(x), y).backward()
    opt.step()

net = nn.Sequential(*(LoRALinear(m) if isinstance(m, nn.Linear) else m for m in base))
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=3e-3)
for step in range(120):
    x, y = recordings(64, "baroque")
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
