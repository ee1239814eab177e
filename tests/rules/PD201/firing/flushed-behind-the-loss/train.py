"""An FP16 model under a loss in small units: the cast behind the loss flushes the whole gradient on its way back."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).half()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
target = torch.randn(16, 4)

for _ in range(20):
    x = torch.randn(32, 16)
    optimizer.zero_grad()
    F.mse_loss(model(x.half()).float() * 1e-5, x @ target * 1e-5).backward()
    optimizer.step()
