"""torchao: AdamW with 8-bit states, compiled by the library itself.

library: torchao
"""

import torch
import torch.nn.functional as F
from _digest import finish
from torch import nn
from torchao.optim import AdamW8bit

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 256))
optimizer = AdamW8bit(model.parameters(), lr=1e-3)
losses = []
for _ in range(40):
    tokens = torch.cumsum(torch.randint(0, 3, (32, 9)), dim=1) % 256
    loss = F.cross_entropy(model(tokens[:, :8]), tokens[:, 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
