"""Finds the memory of weights that ranks share out: FP32 copies in flat partitions or shards, and gathered shards.

Read from attributes that the libraries set on weights and engine: DeepSpeed 0.19 (``_hp_mapping`` of ZeRO 1 and 2 and
of its BF16 optimizer, ``grad_position`` of ZeRO 3, flat groups without ZeRO) and Megatron-core 0.16 (``main_param``;
shards of FP32 weights are views of them).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from precdoctor.recording.model import static

#: Attributes of a weight whose FP32 copy may be on another rank.
_MARKS: Final = frozenset(("_hp_mapping", "main_param"))
_ENGINES: Final = frozenset(("DeepSpeedEngine", "PipelineEngine"))


class Piece(NamedTuple):
    """A weight of a model, and the elements of another tensor that are a copy of it (or part of it); None for all."""

    weight: weakref.ref[Tensor]
    part: slice | None


class Pieces:
    """Finds the pieces of the tensors that optimizers get.

    Args:
        models: returns the top-level modules as the script calls them, wrappers included.
    """

    def __init__(self, models: Callable[[], Iterable[nn.Module]]) -> None:
        self._models = models
        self._known: static.ByIdentity[Tensor, tuple[int, tuple[Piece, ...]]] = static.ByIdentity()
        #: Copies by the address of their memory; None before the first search of a step.
        self._copies: dict[int, list[_Copy]] | None = None

    def begin(self) -> None:
        """Forget where copies are, because models may have changed and tensors may have moved."""
        self._copies = None

    def of(self, x: Tensor) -> tuple[Piece, ...]:
        """Return the pieces of a tensor, in order; empty if it has none."""
        if type(x) not in static.TENSORS or not x.is_contiguous() or not _has_memory(x):
            return ()
        known = self._known.get(x)
        if known is not None and known[0] == x.data_ptr() and all(p.weight() is not None for p in known[1]):
            return known[1]
        found = tuple(self._search(x))
        return self._known.put(x, (x.data_ptr(), found))[1] if found else ()

    def _search(self, x: Tensor) -> Iterator[Piece]:
        if self._copies is None:
            self._copies = {}
            for model in self._models():
                for copy in _copies(model):
                    self._copies.setdefault(copy.memory, []).append(copy)
        begin, size = x.storage_offset(), x.numel()
        copies = self._copies.get(x.untyped_storage().data_ptr(), ())
        inside = [c for c in copies if c.numel and begin <= c.start and c.start + c.numel <= begin + size]
        for copy in sorted(inside, key=lambda c: (c.start, c.numel)):
            weight = copy.weight()
            whole = copy.numel == size and weight is not None and x.shape == weight.shape
            part = None if whole else slice(copy.start - begin, copy.start - begin + copy.numel)
            yield Piece(copy.weight, part)

    def replicated(self) -> Iterator[Tensor]:
        """Iterate over the weights that each rank has in whole while their FP32 copies are shared out."""
        for model in self._models():
            for weight in static.parameters(model):
                if not _MARKS.isdisjoint(static.own(weight)):
                    yield weight


class _Copy(NamedTuple):
    """A copy of a weight or of a part of it: address of its memory, first element there, size, the weight."""

    memory: int
    start: int
    numel: int
    weight: weakref.ref[Tensor]


def gathered(module: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over the shards of ``fully_shard``, each with the whole weight that accumulates its gradient."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for part in static.modules(module) if kind is not None else ():
        if not issubclass(type(part), kind):
            continue
        state = kind._get_fsdp_state(part)
        # Up to torch 2.11 there is one group.
        groups = static.attribute(state, "_fsdp_param_groups") or [static.attribute(state, "_fsdp_param_group")]
        for group in static.elements(groups):
            for held in static.elements(static.attribute(group, "fsdp_params")):
                shard, whole = (static.attribute(held, name) for name in ("sharded_param", "_unsharded_param"))
                if issubclass(type(shard), Tensor) and type(whole) in static.TENSORS:
                    yield shard, whole


def stored(weight: Tensor) -> Tensor:
    """Return the part of a weight that this rank keeps between two steps: its own shard with ZeRO 3."""
    part: Any = static.own(weight).get("ds_tensor")
    return part if type(part) in static.TENSORS else weight


def _copies(model: nn.Module) -> Iterator[_Copy]:
    for weight in static.parameters(model):
        own = static.own(weight)
        fragment: Any = static.attribute(own.get("_hp_mapping"), "hp_fragment")
        copies: tuple[Any, ...] = fragment, own.get("main_param"), weight
        for copy in copies:
            if type(copy) in static.TENSORS and copy.is_contiguous() and _has_memory(copy):
                yield _Copy(copy.untyped_storage().data_ptr(), copy.storage_offset(), copy.numel(), weakref.ref(weight))
        if (zero := own.get("_z3_optimizer")) is not None and (found := _of_zero3(weight, own, zero)) is not None:
            yield found
    if type(model).__name__ in _ENGINES:
        yield from _of_flat_groups(model)


def _of_zero3(weight: Tensor, own: dict[str, Any], zero: Any) -> _Copy | None:
    """Return this rank's FP32 copy of a weight under ZeRO 3; None if it has none."""
    position = static.elements(dict.get(static.attribute(zero, "grad_position", {}), own.get("ds_id")))
    groups = static.elements(static.attribute(zero, "fp32_partitioned_groups_flat"))
    if len(position) != 3 or not {int}.issuperset(map(type, position)) or not 0 <= position[0] < len(groups):
        return None
    flat = groups[position[0]]
    if type(flat) not in static.TENSORS or not _has_memory(flat):
        return None
    return _Copy(
        flat.untyped_storage().data_ptr(), flat.storage_offset() + position[1], position[2], weakref.ref(weight)
    )


def _of_flat_groups(engine: nn.Module) -> Iterator[_Copy]:
    """Iterate over the copies without ZeRO: weights are views of flat 16-bit groups, in the order of the FP32 ones."""
    optimizer = static.attribute(engine, "optimizer")
    narrow, wide = (static.elements(static.attribute(optimizer, f"{p}_groups_flat")) for p in ("fp16", "fp32"))
    groups = {
        a.untyped_storage().data_ptr(): (a.storage_offset(), b)
        for a, b in zip(narrow, wide, strict=False)
        if type(a) in static.TENSORS and type(b) in static.TENSORS and _has_memory(a) and _has_memory(b)
    }
    for weight in static.parameters(engine) if groups else ():
        if type(weight) in static.TENSORS and (found := groups.get(weight.untyped_storage().data_ptr())) is not None:
            begin, flat = found
            start = flat.storage_offset() + weight.storage_offset() - begin
            yield _Copy(flat.untyped_storage().data_ptr(), start, weight.numel(), weakref.ref(weight))


def _has_memory(x: Tensor) -> bool:
    """Return whether a tensor has memory that is not freed."""
    return not x.is_meta and x.untyped_storage().nbytes() > 0
