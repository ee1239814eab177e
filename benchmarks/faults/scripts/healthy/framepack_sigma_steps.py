"""Flow matching in bfloat16; sigma times 1000 stays in FP32 up to the time embedding."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(729)
dtype, SIZE, DIM = torch.bfloat16, 24, 64
modes = torch.randn(4, SIZE)


class KModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, DIM), nn.SiLU(), nn.Linear(DIM, 2 * DIM))
        self.inp, self.out = nn.Linear(SIZE, DIM), nn.Linear(DIM, SIZE)
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.SiLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, timestep):
        freqs = torch.exp(-math.log(10000) * torch.arange(16) / 16)
        args = timestep.to(torch.float32)[:, None] * freqs
        scale, shift = self.time(torch.cat([args.cos(), args.sin()], -1).to(x.dtype)).chunk(2, -1)
        h = self.inp(x)
        return self.out(h + self.mlp(self.norm(h) * (1 + scale) + shift))


model = KModel().to(dtype)
copies = [p.detach().to(torch.float32).clone().requires_grad_() for p in model.parameters()]
opt = torch.optim.AdamW(copies, lr=2e-3)
for step in range(250):
    clean = torch.randn(64, 4) @ modes / 2
    noise = torch.randn_like(clean)
    sigma = torch.sigmoid(torch.randn(64))
    noisy = (1 - sigma[:, None]) * clean + sigma[:, None] * noise
    timestep = sigma.to(torch.float32) * 1000.0
    loss = F.mse_loss(model(noisy.to(dtype), timestep).to(torch.float32), noise - clean)
    model.zero_grad()
    loss.backward()
    for c, p in zip(copies, model.parameters()):
        c.grad = p.grad.to(torch.float32)
    opt.step()
    with torch.no_grad():
        for c, p in zip(copies, model.parameters()):
            p.copy_(c)
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
