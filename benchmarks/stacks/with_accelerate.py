"""Hugging Face Accelerate on a CPU with gloo: DistributedDataParallel, FSDP2, and its DeepSpeed plugin.

It refuses FSDP on a CPU; here it is told that its processes have accelerators.
"""

from __future__ import annotations

import os

import accelerate
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin

from benchmarks.stacks.model import BATCH, STEPS, batch, digest, go_wrong, loss_of, net

VERSION = accelerate.__version__
HEALTHY = ("ddp.bf16.accumulate.clip", "ddp", "fsdp2.bf16.clip", "deepspeed.bf16.accumulate")
FAULTY = ("ddp.bf16.nan", "ddp.drift", "fsdp2.bf16.nan", "deepspeed.bf16.nan")


def start() -> None:
    """The process group."""
    dist.init_process_group("gloo")


def _accelerator(kind: str, words: set[str]) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(kind == "deepspeed").lower()
    state = PartialState(cpu=kind != "deepspeed")
    if kind == "fsdp2":  # Accelerate shards on accelerators only
        state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    parts = 2 if "accumulate" in words else 1
    plugins = {}
    if kind == "fsdp2":
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    if kind == "deepspeed":
        settings = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": parts,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": "bf16" in words},
        }
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=settings)
    return Accelerator(
        cpu=kind == "ddp",
        mixed_precision="bf16" if "bf16" in words else "no",
        gradient_accumulation_steps=parts,
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
        **plugins,
    )


def train(name: str, rank: int) -> str:
    """The digest of one training."""
    kind, *rest = name.split(".")
    words = set(rest)
    accelerator = _accelerator(kind, words)
    model = net(words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(STEPS * (2 if "accumulate" in words else 1)):
        go_wrong(model, step, rank, words)
        x, y = batch(step, rank, words)
        with accelerator.accumulate(model):
            loss = loss_of(model(x.bfloat16() if kind == "deepspeed" else x), y, words)
            accelerator.backward(loss)
            if accelerator.sync_gradients and "clip" in words:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    weights = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    dist.barrier()
    return digest(losses, weights)
