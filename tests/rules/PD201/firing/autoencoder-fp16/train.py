"""An autoencoder in FP16 autocast without a loss scaler: a mean over many elements, and a small weight on top of it."""

import torch
from torch import nn

STEPS = 8

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(48, 32),
    nn.Tanh(),
    nn.Linear(32, 8),
    nn.Tanh(),
    nn.Linear(8, 32),
    nn.Tanh(),
    nn.Linear(32, 48),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    signal = torch.randn(128, 8) @ torch.ones(8, 48) + torch.randn(128, 48)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1e-3 * ((model(signal).float() - signal) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4e}")
