"""DDP, FSDP2 in BF16, or FSDP in FP16 with its own scaler, on one rank: `SHARDED` in the environment names it."""

import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
from common import DEVICE, ON_GPU, skip, tell
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

how = os.environ["SHARDED"]
if how == "fsdp" and not ON_GPU:
    skip("it needs a GPU")
store = f"file://{tempfile.mkdtemp()}/store"
dist.init_process_group("nccl" if ON_GPU else "gloo", init_method=store, rank=0, world_size=1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)], nn.Linear(64, 8)).to(DEVICE)
run, scaler = model, None
if how == "ddp":
    run = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
elif how == "fsdp2":
    mesh = dist.init_device_mesh(DEVICE, (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
else:
    half = MixedPrecision(torch.float16, torch.float16, torch.float16)
    run = FullyShardedDataParallel(model, use_orig_params=True, mixed_precision=half, device_id=0)
    scaler = ShardedGradScaler(init_scale=2.0**20)  # which overflows at first
optimizer = torch.optim.AdamW(run.parameters(), 1e-3)
for _ in range(20):
    for micro in range(2):
        with run.no_sync() if how == "ddp" and micro == 0 else contextlib.nullcontext():
            out = run(torch.randn(32, 64, device=DEVICE)).float()
            loss = nn.functional.cross_entropy(out, torch.randint(8, (32,), device=DEVICE))
            (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
tell(model)
dist.destroy_process_group()
