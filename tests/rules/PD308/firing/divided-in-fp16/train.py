"""FP16 weights without master copies; the loss is scaled by hand, and unscaled in FP16 again."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, SCALE = 10, 4096.0

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 16)).half()
optimizer = torch.optim.SGD(model.parameters(), lr=3000.0)
for step in range(STEPS):
    signal = torch.randn(32, 64).half()
    restored = model(signal)
    loss = 1e-5 * F.mse_loss(restored.float(), signal[:, :16].float())
    (loss * SCALE).backward()
    for parameter in model.parameters():
        parameter.grad /= SCALE
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4g}")
