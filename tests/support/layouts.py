"""Small trainings of every parallel layout, recorded one after the other.

`torchrun ... -m tests.support.layouts DIRECTORY STEPS NAME ...`, from the root of the repository. A name is a layout
and what is done about it, with dots between: ``ddp``, ``ddp.accumulate``, ``ddp.flip``.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from precdoctor.recording import installation
from precdoctor.recording.options import RecordOptions
from precdoctor.runlog.layout import create_run

WIDTH, BATCH = 16, 32
#: The step before which faults happen.
FAULT = 4


class Net(nn.Module):
    """A layer with its activation, a norm, and a head, which is a residual."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = norm(4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(nn.functional.gelu(self.up(x))))


Step = Callable[[Tensor], None]


class Training:
    """One of them: a model, its optimizer, and one step on a batch."""

    def __init__(self, layout: str, options: set[str]) -> None:
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(self.rank if options & {"seeds", "unsynced"} else 0)
        #: Ranks of one group read the same data.
        self.reads = self.rank
        net = Net(nn.BatchNorm1d if "batchnorm" in options else nn.LayerNorm)
        if "frozen" in options:
            net.up.requires_grad_(False)
        self.model = getattr(self, layout)(net)
        self.inner = getattr(self.model, "module", self.model)
        if "reset" in options and self.rank == self.world - 1:
            with torch.no_grad():
                self.inner.down.weight.normal_(0.0, 0.1)
        if "seeds" in options:
            nn.init.normal_(self.inner.up.weight, std=0.1)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        kind = torch.optim.SGD if "sgd" in options else torch.optim.AdamW
        self.optimizer = kind(parameters, lr=2e-2 if "sgd" in options else 2e-3)

    # --- layouts -----------------------------------------------------------------------------------------------------

    def ddp(self, net: nn.Module) -> nn.Module:
        """Replicas on all ranks."""
        if "ignored" in self.options:
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["up.weight", "up.bias"])
            with torch.no_grad():
                net.up.weight.add_(1e-3 * self.rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch rename the argument
            # Older versions of torch always broadcast.
            unsynced = {"init_sync": False} if "unsynced" in self.options else {}
            return DistributedDataParallel(net, broadcast_buffers="batchnorm" not in self.options, **unsynced)

    def fsdp1(self, net: nn.Module) -> nn.Module:
        """One flat parameter, in shards."""
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params="original" in self.options)

    def hybrid(self, net: nn.Module) -> nn.Module:
        """The same in two replicas."""
        mesh = init_device_mesh("cpu", (2, self.world // 2))
        return FullyShardedDataParallel(
            net,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        )

    def fsdp2(self, net: nn.Module) -> nn.Module:
        """Every parameter in shards."""
        fully_shard(net.up)
        return fully_shard(net)

    def hsdp(self, net: nn.Module) -> nn.Module:
        """The same in two replicas."""
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(net.up, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    def tp(self, net: nn.Module) -> nn.Module:
        """Linear layers in parts."""
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        self.reads = 0
        return self._in_parts(net, mesh)

    def fsdp2_tp(self, net: nn.Module) -> nn.Module:
        """Parts of them in shards."""
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
        self.reads = mesh.get_local_rank("dp")
        return fully_shard(self._in_parts(net, mesh["tp"]), mesh=mesh["dp"])

    def ddp_tp(self, net: nn.Module) -> nn.Module:
        """Replicas on the ranks of a group."""
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
        self.reads = mesh.get_local_rank("dp")
        return DistributedDataParallel(net, process_group=mesh.get_group("dp"))

    def _in_parts(self, net: nn.Module, mesh: dist.DeviceMesh) -> nn.Module:
        plan = {
            "up": ColwiseParallel(output_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "down": RowwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        return parallelize_module(net, mesh, plan)

    def pp(self, net: nn.Module) -> nn.Module:
        """Two stages, of one rank each, or of two with shards."""
        groups = self.world // 2
        mesh = init_device_mesh("cpu", (2, groups), mesh_dim_names=("pp", "dp"))
        index, self.reads = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
        part = nn.Sequential(net.up, nn.GELU()) if index == 0 else nn.Sequential(net.norm, net.down)
        self.mesh = mesh
        if groups > 1:
            part = fully_shard(part, mesh=mesh["dp"])
        stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B if "1f1b" in self.options else ScheduleGPipe
        self.schedule = schedule(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
        return part

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, number: int) -> None:
        """One optimizer step, and before it what goes wrong."""
        self._go_wrong(number)
        draws = torch.Generator().manual_seed(100 * number + self.reads)
        parts = 4 if "accumulate" in self.options else 1
        self.optimizer.zero_grad()
        for part in range(parts):
            with self._without_reduction() if part < parts - 1 or "local" in self.options else contextlib.nullcontext():
                self._backward(torch.randn(BATCH, WIDTH, generator=draws), 1.0 / parts)
        if "clip" in self.options:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if "local" in self.options and number % 4 == 3:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data.div_(self.world)

    def _backward(self, x: Tensor, weight: float) -> None:
        target = x.roll(1, dims=1).tanh()
        if hasattr(self, "schedule"):
            if self.schedule._stage.stage_index == 0:
                self.schedule.step(x)
            else:
                self.schedule.step(target=target)
            return
        with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in self.options):
            loss = (self.model(x).float() - target).square().mean() * weight
        loss.backward()

    @contextlib.contextmanager
    def _without_reduction(self) -> Iterator[None]:
        if isinstance(self.model, (DistributedDataParallel, FullyShardedDataParallel)):
            with self.model.no_sync():
                yield
        elif hasattr(self.model, "set_requires_gradient_sync"):
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        else:
            yield

    def _go_wrong(self, number: int) -> None:
        if number != FAULT or self.rank != 1:
            return
        weight = self.inner.down.weight if hasattr(self.inner, "down") else next(self.inner.parameters())
        if "bias" in self.options:
            weight = self.inner.down.bias
        if "flip" in self.options:
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            bits = local.detach().view(-1)[3:4].view(torch.int32)
            bits ^= 1 << (30 if "huge" in self.options else 22)


def weights(model: nn.Module) -> bytes:
    """The bits of what this rank holds."""
    tensors = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return b"".join(t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors if t.numel())


def main() -> None:
    """Record each named training into a directory of its name; those with `plain` only run."""
    out, steps, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    for name in names:
        layout, *options = name.split(".")
        run = Path(out) / name
        if dist.get_rank() == 0:
            create_run(run, {"command": ["torchrun", name]})
        gc.collect()  # meshes of the one before
        dist.barrier()
        recorder = None if "plain" in options else installation.begin(run, RecordOptions(every=1, strict=True))
        try:
            training = Training(layout, set(options))
            for number in range(int(steps)):
                training.step(number)
        finally:
            if recorder is not None:
                recorder.end()
        if dist.get_rank() == 1:
            (run / "weights").write_bytes(weights(training.model))
        del training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
