"""What is kept of a call of a top-level module for a replay, and facts about the module that hold for all its calls.

Forward passes write to buffers at any call. The first call may also write to parameters: scales taken from the data
(ActNorm, weight normalisation), codebooks filled with samples. Version counters show it. The parameters' earlier values
are not kept; plain attributes such as a flag ``ready`` are, until the call returns, or until the step ends if the call
did write.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precdoctor.recording import kernels
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.source_lines import Line
from precdoctor.recording.scene.state_restore import Attributes, Autocast, RandomState

if TYPE_CHECKING:
    from precdoctor.recording.scene.loss_graph import LossGraph

#: Formats of buffers that are copied together; torch cannot concatenate every other one.
_JOINED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool))


class FirstCall:
    """The state of a module before its first call, to see which parameters that call writes to."""

    def __init__(self, module: nn.Module) -> None:
        own = unwrap(module)
        #: Plain attributes of every submodule from before the call.
        self.attributes = Attributes(static.modules(own))
        self._versions = [(name, weakref.ref(p), tensor_leaves.version(p)) for name, p in static.named_parameters(own)]

    def written_parameters(self) -> frozenset[str]:
        """Return the names of parameters written to since the call began."""
        now = ((name, ref(), version) for name, ref, version in self._versions)
        return frozenset(
            name for name, p, version in now if isinstance(p, Tensor) and tensor_leaves.version(p) != version
        )


class Buffers:
    """The buffers of one root, and which of them its forward passes write to."""

    def __init__(self, module: nn.Module) -> None:
        self._refs = [
            (weakref.ref(owner), name, weakref.ref(b))
            for owner in static.modules(module)
            for name, b in static.held(owner, "_buffers").items()
            if b is not None and not b.is_inference()
        ]
        self.has_any = bool(self._refs)
        self._stamps: list[object] | None = None
        self._written_indices: set[int] | None = None

    def before(self, afford: Callable[[Tensor], bool]) -> dict[int, Tensor]:
        """Copy, by ``id``, the buffers known to be written to (at the first call: all), as far as ``afford`` allows."""
        live = list(self._live())
        self._stamps = [stamp for _, stamp, _ in live]
        wanted = [b for i, _, b in live if (self._written_indices is None or i in self._written_indices) and afford(b)]
        return _copies(wanted)

    def after(self) -> None:
        """Add the buffers that were written to since :meth:`before`."""
        live = list(self._live())
        if self._stamps is not None and len(live) == len(self._stamps):
            changed = {i for (i, now, _), then in zip(live, self._stamps, strict=True) if now != then}
            self._written_indices = (self._written_indices or set()) | changed

    def _live(self) -> Iterator[tuple[int, object, Tensor]]:
        """Yield index, version stamp and tensor of each buffer that is still alive."""
        for i, (owner_ref, name, ref) in enumerate(self._refs):
            owner, buffer = owner_ref(), ref()
            if owner is not None and buffer is not None:
                yield i, tensor_leaves.buffer_stamp(owner, name, buffer), buffer


def _copies(tensors: list[Tensor]) -> dict[int, Tensor]:
    """Return copies by ``id``; one ``cat`` makes all of a dtype on a device, because many small copies are slow."""
    groups: dict[object, list[Tensor]] = {}
    for x in tensors:
        joins = type(x) in tensor_leaves.EXACT and x.layout is torch.strided and x.dtype in _JOINED
        groups.setdefault((x.dtype, x.device) if joins else id(x), []).append(x)
    copies = {}
    for group in groups.values():
        if len(group) == 1:
            copies[id(group[0])] = group[0].detach().clone()
            continue
        flat = torch.cat([x.detach().reshape(-1) for x in group])
        for x, part in zip(group, flat.split([x.numel() for x in group]), strict=True):
            copies[id(x)] = part.view(x.shape)
    return copies


class TopLevel:
    """Facts about a top-level module that hold for all its calls.

    Attributes:
        why_not: why replaying it alone would be wrong; None if it can be replayed.
        called: whether it has been called; calls in ``torch.func.functional_call`` do not count.
        writes: names of parameters that its forward passes write to.
    """

    def __init__(self, module: nn.Module) -> None:
        self.why_not = _why_not_replayable(module)
        self.called, self.writes = False, frozenset[str]()
        with kernels.apart_from_user_modes():  # else __torch_function__ of lazy (uninitialized) buffers raises
            self.buffers = Buffers(module)
        self._devices: tuple[torch.device, frozenset[torch.device]] | None = None
        #: Name of its first parameter, split at the dots.
        self._name: tuple[str, ...] = ()

    def first(self, module: nn.Module) -> Tensor | None:
        """Return its first parameter, looked up by the last known name, anew if that is gone; None if it has none."""
        found = static.parameter(module, self._name) if self._name else None
        if found is None:
            name, found = next(static.named_parameters(module), ("", None))
            self._name = tuple(name.split("."))
        return found

    def devices(self, module: nn.Module, first: Tensor) -> frozenset[torch.device]:
        """Return the devices of its parameters; determined once, and again if the first parameter has moved."""
        if self._devices is None or self._devices[0] != first.device:
            self._devices = first.device, frozenset(p.device for p in static.parameters(module))
        return self._devices[1]


def _why_not_replayable(module: nn.Module) -> str | None:
    """Return why replaying this module alone would be wrong; None if it can be replayed."""
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


@dataclass(eq=False)
class RootCall:
    """One call of a top-level module in training."""

    module: nn.Module
    root: str
    micro_step: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: Name, tensor and version counter at the call of each tensor leaf of the arguments.
    versions: list[tuple[str, Tensor, int]]
    random: RandomState
    autocast: tuple[Autocast, ...]
    #: Whether the module has parameters; loss modules have none.
    parametric: bool
    #: Source line of the call in the user's code.
    line: Line | None
    #: Whether ``module`` is a copy of the user's module, which must not be kept alive.
    stand_in: bool = False
    #: Whether gradients were off: a custom autograd function (the adjoint of an ODE) computes them itself.
    without_gradients: bool = False
    #: In ``torch.func.functional_call``: the tensors used in place of the parameters, by name.
    bound: Mapping[str, Tensor] = field(default_factory=dict)
    #: Names in ``bound`` whose tensors the step has computed: by an inner loop, or a network that outputs weights.
    computed: frozenset[str] = frozenset()
    #: Buffers that forward passes write to: copies from before the call, by ``id`` of the buffer.
    buffers: Mapping[int, Tensor] = field(default_factory=dict)
    #: Names of parameters that forward passes write to; the state before the module's first call, if this was it.
    writes: frozenset[str] = frozenset()
    first: FirstCall | None = None
    #: On later calls: copies of the parameters named in ``writes``, from before the call.
    before: Mapping[str, Tensor] = field(default_factory=dict)
    #: Output leaves with their version counters, and the gradients that ``backward`` computed for them, by name.
    outputs: list[tuple[str, Tensor, int]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    #: Whether it has returned: false while it runs, and if it raised.
    returned: bool = False
    #: Outputs whose gradient did not fit into the scene memory; a replay of the loss code may compute it again.
    lost: set[str] = field(default_factory=set)
    #: Output gradients in each call of ``torch.autograd.grad``, by the number of that call in the step.
    grad_call_gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    #: Autograd node behind each output: its sequence number, and the index of the output among the node's outputs.
    makers: dict[str, tuple[int, int]] = field(default_factory=dict)
    #: Graphs of the arguments that code between another top-level module and this call has computed.
    graphs: list[LossGraph] = field(default_factory=list)
    #: Facts about the module that hold for all its calls.
    top_level: TopLevel | None = None
    #: Objects other than modules whose attributes a replay may write to.
    owners: tuple[object, ...] = ()

    @property
    def prepares_data(self) -> bool:
        """Whether nothing in it is trained and no gradient reaches it, as in a torchvision transform called per sample.

        Such a call can be dropped: its result is an argument of another call and kept there.
        """
        return self.stand_in and not self.makers

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass or ``torch.autograd.grad`` has reached an output."""
        return bool(self.gradients or self.lost or self.grad_call_gradients)

    def output(self, name: str) -> Tensor | None:
        """Return the last output of this name as the run made it; None if not kept, or written to since."""
        kept = (x for own, x, version in reversed(self.outputs) if own == name and tensor_leaves.version(x) == version)
        return next(kept, None)

    @property
    def changed(self) -> list[str]:
        """Names of arguments written to since the call began."""
        return [name for name, x, version in self.versions if tensor_leaves.version(x) != version]
