"""A gated MLP in FP16 whose product of two large halves stays just below 65504, batch after batch."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 14


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.product = nn.Identity()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.product(self.up(x) * F.silu(self.gate(x))) / 4096)


torch.manual_seed(0)
model = nn.Sequential(nn.LayerNorm(16), Gated(16), nn.Linear(16, 4))
with torch.no_grad():
    model[1].up.weight *= 116.0
    model[1].gate.weight *= 116.0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for step in range(STEPS):
    features = torch.randn(1024, 16).sign()
    labels = torch.randint(4, (1024,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(features)
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
