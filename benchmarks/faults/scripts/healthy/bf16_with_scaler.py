"""A U-shaped denoiser in BF16 autocast that still has the scaler of its FP16 days: of no use, and of no harm."""

import torch
import torch.nn.functional as F
from torch import nn


class Denoiser(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down1, self.down2 = nn.Conv1d(1, width, 5, 2, 2), nn.Conv1d(width, 2 * width, 5, 2, 2)
        self.up2 = nn.ConvTranspose1d(2 * width, width, 4, 2, 1)
        self.up1 = nn.ConvTranspose1d(2 * width, 1, 4, 2, 1)

    def forward(self, x):
        a = F.silu(self.down1(x))
        b = F.silu(self.down2(a))
        return x - self.up1(torch.cat([F.silu(self.up2(b)), a], 1))


torch.manual_seed(0)
model = Denoiser()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu")
t = torch.linspace(0, 1, 64)
for step in range(80):
    clean = torch.sin(6.28 * (1 + 4 * torch.rand(32, 1)) * t + 6.28 * torch.rand(32, 1)).unsqueeze(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(clean + 0.5 * torch.randn_like(clean))
    loss = F.mse_loss(out.float(), clean)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
