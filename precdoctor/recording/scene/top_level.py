"""What is asked about a top-level module at each of its calls, found out at the first one."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.model import static
from precdoctor.recording.scene.first_call import Buffers


class TopLevel:
    """Of one of them.

    Attributes:
        why_not: why running it again by itself would be wrong; null when it is not.
        called: so that the next call is not the first; not inside of ``torch.func.functional_call``.
        writes: names of parameters that its forward passes are known to write to.
    """

    def __init__(self, module: nn.Module) -> None:
        self.why_not = _why_not_replayable(module)
        self.called, self.writes = False, frozenset[str]()
        with kernels.apart_from_user_modes():  # lazy ones refuse to be asked
            self.buffers = Buffers(module)
        self._devices: tuple[torch.device, frozenset[torch.device]] | None = None
        #: The name of its first parameter, in parts.
        self._name: tuple[str, ...] = ()

    def first(self, module: nn.Module) -> Tensor | None:
        """Its first parameter, or the one that was; null when it has none."""
        found = static.parameter(module, self._name) if self._name else None
        if found is None:
            name, found = next(static.named_parameters(module), ("", None))
            self._name = tuple(name.split("."))
        return found

    def devices(self, module: nn.Module, first: Tensor) -> frozenset[torch.device]:
        """Where its parameters are; walked through once, unless the first one has moved."""
        if self._devices is None or self._devices[0] != first.device:
            self._devices = first.device, frozenset(p.device for p in static.parameters(module))
        return self._devices[1]


def _why_not_replayable(module: nn.Module) -> str | None:
    """Why running this module again by itself would be wrong; None when it is not."""
    for part in static.modules(module):
        names = {c.__name__ for c in type(part).__mro__}
        if names & {"FSDPModule", "FullyShardedDataParallel"}:
            return "its parameters are sharded (FSDP)"
        if "SyncBatchNorm" in names:
            return "SyncBatchNorm talks to the other ranks"
        if names & {"DeepSpeedEngine", "PipelineStage"}:
            return f"{type(part).__name__} schedules its own passes"
        if type(part).__module__.startswith("megatron."):
            return f"{type(part).__name__} may talk to the other ranks (Megatron)"
        if any(issubclass(type(v), torch.Generator) for v in static.module_dict(part).values()):
            return f"{type(part).__name__} has a random number generator of its own"
    dtensor = sys.modules.get("torch.distributed.tensor")
    if dtensor is not None and any(issubclass(type(p), dtensor.DTensor) for p in static.parameters(module)):
        return "its parameters are sharded (DTensor)"
    return None
