"""What torch itself has: DistributedDataParallel, FSDP2 with the dtypes of its gradient reduction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.stacks.model import STEPS, batch, digest, go_wrong, loss_of, net

VERSION = torch.__version__.partition("+")[0]
HEALTHY = (
    *("ddp", "ddp.autocast.clip", "ddp.compressed"),
    *("fsdp2", "fsdp2.bf16.fp32-reduce.clip", "fsdp2.bf16.bf16-reduce", "fsdp2.bf16.fp16-reduce", "fsdp2.fp32-reduce"),
)
FAULTY = (
    *("ddp.nan", "ddp.drift", "ddp.compressed.low"),
    *("fsdp2.bf16.bf16-reduce.nan", "fsdp2.bf16.fp16-reduce.low", "fsdp2.pure.lost"),
)


def start() -> None:
    """The process group."""
    dist.init_process_group("gloo")


def _wrapped(model: nn.Module, kind: str, words: set[str]) -> nn.Module:
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
        if "compressed" in words:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped
    reduced = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if "bf16" in words else None,
        reduce_dtype=next((dtype for name, dtype in reduced.items() if f"{name}-reduce" in words), None),
    )
    for part in (model.up, *model.experts):
        fully_shard(part, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def train(name: str, rank: int) -> str:
    """The digest of one training."""
    kind, *rest = name.split(".")
    words = set(rest)
    made = net(words).to(torch.bfloat16 if "pure" in words else torch.float32)
    model = _wrapped(made, kind, words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6 if "lost" in words else 3e-3)
    losses = []
    for step in range(STEPS):
        go_wrong(model, step, rank, words)
        x, y = batch(step, rank, words)
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in words):
            logits = model(x.bfloat16() if "pure" in words else x)
        loss = loss_of(logits, y, words)
        optimizer.zero_grad()
        loss.backward()
        if "clip" in words:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return digest(losses, (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()))
