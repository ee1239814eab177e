"""torchrun: FSDP2 over two ranks, BF16 parameters and FP32 reduction, a block at a time.

library: torch
launch: torchrun 2
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _digest import finish
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(64, 32),
    *(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)),
    nn.Linear(32, 64),
)
mesh = init_device_mesh("cpu", (2,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model[1:3]:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
torch.manual_seed(100 + rank)
losses = []
for _ in range(40):
    tokens = torch.cumsum(torch.randint(0, 3, (8, 17)), dim=1) % 64
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
dist.destroy_process_group()
