"""BF16 autocast with activation checkpointing; the loss is divided by sixteen micro-batches, gradients add up in FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.inp, self.out = nn.Linear(10, dim), nn.Linear(dim, 1)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x).squeeze(-1)


torch.manual_seed(2172)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(30):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(16):
        x = torch.randn(16, 10)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction = model(x)
        loss = F.mse_loss(prediction.float(), torch.sin(x[:, 0]) + x[:, 1] * x[:, 2].sign()) / 16
        loss.backward()
        total += loss.item()
    optimizer.step()
    print(f"step {step} loss {total:.4f}")
