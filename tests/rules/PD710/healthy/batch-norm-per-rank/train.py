"""Statistics of batch norm differ between two ranks, and so does a random seed; the weights do not."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(dist.get_rank())

model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 1))
model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(16):
    inputs = torch.randn(32, 16)
    loss = (model(inputs) - inputs[:, :4].sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
