"""A rank that sends its gradients in FP16: most of them are too small for it."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

STEPS = 12

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2)))
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-12)
    for step in range(STEPS):
        readings = torch.randn(64, 8)
        volts = 1e-4 * torch.stack([readings[:, :4].sum(1), readings[:, 4:].sin().sum(1)], dim=1)
        loss = F.mse_loss(1e-4 * model(readings), volts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4g}")
    dist.destroy_process_group()
