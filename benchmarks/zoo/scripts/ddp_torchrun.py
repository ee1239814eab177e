"""torchrun: DistributedDataParallel over two ranks, with `no_sync` accumulation and SyncBatchNorm left out.

library: torch
launch: torchrun 2
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _digest import finish
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
prototypes = torch.randn(8, 32)
torch.manual_seed(100 + rank)
losses = []
for step in range(60):
    targets = torch.randint(0, 8, (16,))
    inputs = prototypes[targets] + torch.randn(16, 32)
    if step % 2 == 0:
        with model.no_sync():
            F.cross_entropy(model(inputs), targets).backward()
        continue
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
finish(losses, model)
dist.destroy_process_group()
