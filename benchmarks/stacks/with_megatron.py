"""Megatron-core on a CPU with gloo: its DistributedDataParallel, DistributedOptimizer and gradient scalers.

Its source names CUDA where it makes small tensors and asks for types. Here these names stand for the CPU.
"""

from __future__ import annotations

import functools
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.stacks.model import HIDDEN, STEPS, WIDTH, batch, digest, go_wrong, loss_of
from benchmarks.stacks.model import net as made

HEALTHY = (
    *("bf16.distributed", "bf16.distributed.clip.fp32-reduce", "bf16"),
    *("fp16.distributed", "fp16", "fp16.distributed.static", "bf16.tp.distributed"),
)
FAULTY = (
    *("bf16.distributed.nan", "bf16.drift", "bf16.tp.distributed.nan"),
    *("fp16.distributed.static.high", "fp16.distributed.static.low", "fp16.distributed.expert"),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _on_cpu(make):
    @functools.wraps(make)
    def made(*args, **kwargs):
        return make(*args, **{k: "cpu" if k == "device" and v == "cuda" else v for k, v in kwargs.items()})

    return made


def _type_of(original):
    @functools.wraps(original)
    def type_of(self, *args, **kwargs):
        found = original(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if type(found) is str else found

    return type_of


for _name in ("tensor", "zeros", "empty"):
    setattr(torch, _name, _on_cpu(getattr(torch, _name)))
torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.type = _type_of(torch.Tensor.type)
warnings.simplefilter("ignore")
import megatron.core  # noqa: E402 - it looks for CUDA as it is imported
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

VERSION = megatron.core.__version__


class ParallelNet(nn.Module):
    """A layer whose columns, and one whose rows, lie on the ranks of a tensor parallel group."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        init = functools.partial(nn.init.normal_, std=0.1)
        columns, rows = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
        self.up = columns(WIDTH, HIDDEN, config=config, init_method=init, gather_output=False)
        self.down = rows(
            HIDDEN, WIDTH, config=config, init_method=init, bias=True, input_is_parallel=True, skip_bias_add=False
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (rows, 8), of x, (rows, WIDTH)."""
        h, _ = self.up(x)
        h, _ = self.down(nn.functional.gelu(h))
        return self.head(self.norm(x + h))


def start() -> None:
    """The process group."""
    dist.init_process_group("gloo")


def train(name: str, rank: int) -> str:
    """The digest of one training."""
    kind, *rest = name.split(".")
    words, parallel = set(rest), 2 if "tp" in rest else 1
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=parallel)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel,
        params_dtype=DTYPES[kind],
        **{kind: True},
    )
    torch.manual_seed(0)
    net = (ParallelNet(config) if parallel > 1 else made(words)).to(DTYPES[kind])
    distributed = "distributed" in words
    reduction = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, grad_reduce_in_fp32="fp32-reduce" in words
    )
    model = DistributedDataParallel(config, reduction, Float16Module(config, net))
    model.broadcast_params()
    static = next((s for word, s in {"high": 2.0**30, "low": 1.0, "static": 128.0}.items() if word in words), None)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        params_dtype=DTYPES[kind],
        use_distributed_optimizer=distributed,
        clip_grad=1.0 if "clip" in words else 0.0,
        loss_scale=static,
        initial_loss_scale=2.0**12,
        loss_scale_window=4,
        hysteresis=1,
        **{kind: True},
    )
    optimizer = get_megatron_optimizer(settings, [model])
    losses = []
    for step in range(STEPS):
        go_wrong(net, step, rank, words)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        x, y = batch(step, parallel_state.get_data_parallel_rank() if parallel == 1 else rank, words)
        loss = loss_of(model(x), y, words)
        optimizer.scale_loss(loss).backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return digest(losses, net.parameters())
