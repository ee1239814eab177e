"""torchao's `Float8Linear` on BF16 weights; compiled with `COMPILED` in the environment."""

import os

import torch
from common import DEVICE, ON_GPU, tell
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 16))
model = model.to(DEVICE, torch.bfloat16)
convert_to_float8_training(model, config=Float8LinearConfig(emulate=not ON_GPU))
run = torch.compile(model) if "COMPILED" in os.environ else model
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
x, labels = torch.randn(64, 256, device=DEVICE).bfloat16(), torch.randint(16, (64,), device=DEVICE)
for _ in range(20):
    nn.functional.cross_entropy(run(x).float(), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
tell(model)
