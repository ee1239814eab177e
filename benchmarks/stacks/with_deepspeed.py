"""DeepSpeed: ZeRO 0 to 3, BF16 and FP16, on a CPU with gloo.

Its CPU accelerator refuses FP16 where the processor has no instructions for it; here it is told that it may.
"""

from __future__ import annotations

import contextlib
import logging

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.stacks.model import BATCH, STEPS, batch, digest, go_wrong, loss_of, net

VERSION = deepspeed.__version__
HEALTHY = (
    *("bf16.zero1", "bf16.zero2.clip", "bf16.zero3", "bf16.zero1.groups.accumulate"),
    *("fp16.zero1", "fp16.zero2.groups.clip", "fp16.zero3", "fp16.zero2.static"),
)
FAULTY = (
    *("bf16.zero2.nan", "bf16.zero3.nan", "bf16.zero1.drift"),
    *("fp16.zero2.static.high", "fp16.zero1.static.low", "fp16.zero2.expert"),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def start() -> None:
    """The process group."""
    type(get_accelerator()).is_fp16_supported = lambda _self: True
    logging.disable(logging.CRITICAL)
    deepspeed.init_distributed("gloo")


def _config(kind: str, stage: int, words: set[str]) -> dict[str, object]:
    scale = {"high": 2.0**30, "low": 1.0}
    static = next((s for word, s in scale.items() if word in words), 128.0)
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2 if "accumulate" in words else 1,
        "gradient_clipping": 1.0 if "clip" in words else 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": kind == "bf16"},
        "fp16": {
            "enabled": kind == "fp16",
            "loss_scale": static if "static" in words else 0,
            "initial_scale_power": 12,
            "loss_scale_window": 4,
            "hysteresis": 1,
        },
    }


def train(name: str, rank: int) -> str:
    """The digest of one training."""
    kind, zero, *rest = name.split(".")
    stage, words = int(zero[-1]), set(rest)
    model = net(words)
    parameters = list(model.parameters())
    if "groups" in words:
        matrices, vectors = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
        parameters = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(kind, stage, words))
    losses = []
    for step in range(STEPS * (2 if "accumulate" in words else 1)):
        go_wrong(model, step, rank, words)
        x, y = batch(step, rank, words)
        loss = loss_of(engine(x.to(DTYPES[kind])), y, words)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    whole = deepspeed.zero.GatheredParameters(list(model.parameters())) if stage == 3 else contextlib.nullcontext()
    with whole:
        found = digest(losses, model.parameters())
    engine.destroy()
    return found
