"""A BF16 model trained through FP32 master copies of its weights: small updates add up there."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(40, 24), nn.Flatten(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 40)).to(
    torch.bfloat16
)
master = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(master, lr=1e-3, weight_decay=0.0)
for step in range(16):
    start = torch.randint(40, (32, 1))
    tokens = (start + torch.arange(5)) % 40
    loss = F.cross_entropy(model(tokens[:, :4]).float(), tokens[:, 4])
    loss.backward()
    for fp32, p in zip(master, model.parameters()):
        fp32.grad, p.grad = p.grad.float(), None
    optimizer.step()
    with torch.no_grad():
        for fp32, p in zip(master, model.parameters()):
            p.copy_(fp32)
    if step % 4 == 0:
        print(step, "loss", loss.item())
