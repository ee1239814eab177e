"""mamba.py: Mamba with its parallel scan, an autograd function that writes in place.

library: mambapy
"""

import torch
import torch.nn.functional as F
from _digest import finish
from mambapy.mamba import Mamba, MambaConfig
from torch import nn

torch.manual_seed(0)
embed, head = nn.Embedding(64, 32), nn.Linear(32, 64)
model = nn.Sequential(embed, Mamba(MambaConfig(d_model=32, n_layers=2, d_state=8)), head)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in range(40):
    ids = (torch.randint(0, 64, (8, 1)) + torch.randint(1, 4, (8, 1)) * torch.arange(17)) % 64
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
