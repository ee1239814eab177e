"""BF16 autocast with the head left in FP32, and float32_matmul_precision "medium"."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 6)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


torch.manual_seed(0)
torch.set_float32_matmul_precision("medium")
model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    x, y = torch.randn(64, 16), torch.randint(6, (64,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
