"""Every master copy is written back to the BF16 model."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 16

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=2e-3)
for step in range(STEPS):
    x, y = torch.randn(64, 8), torch.randint(4, (64,))
    loss = F.cross_entropy(model(x.bfloat16()).float(), y)
    loss.backward()
    for weight, master in zip(model.parameters(), masters, strict=True):
        master.grad, weight.grad = weight.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for weight, master in list(zip(model.parameters(), masters, strict=True)):
            weight.copy_(master)
    print(f"step {step}: loss {loss.item():.4f}")
