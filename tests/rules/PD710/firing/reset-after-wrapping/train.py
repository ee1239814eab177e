"""A new head for another task, made after the broadcast: each of two ranks draws its own."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())  # so that ranks shuffle and drop out differently

model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
model = nn.parallel.DistributedDataParallel(model)
model.module[2].reset_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(16):
    inputs = torch.randn(32, 16)
    loss = (model(inputs) - inputs[:, :4].sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
