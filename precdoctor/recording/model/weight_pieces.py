"""Where the FP32 copy of a weight lies when an optimizer holds it under no name: in a flat partition, or as a shard.

Read from what the libraries keep at the weights and at the engine, by name: DeepSpeed 0.19 (``_hp_mapping`` of ZeRO 1
and 2 and of its BF16 optimizer, ``grad_position`` of ZeRO 3, flat groups without ZeRO) and Megatron-core 0.16
(``main_param``; shards of FP32 weights are views of them).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from precdoctor.recording.model import static

#: Attributes that a weight has when its FP32 copy may lie with another rank.
_MARKS: Final = frozenset(("_hp_mapping", "main_param"))
_ENGINES: Final = frozenset(("DeepSpeedEngine", "PipelineEngine"))


class Piece(NamedTuple):
    """A weight of a model, and which elements of a flat tensor are a copy of it or of a part of it."""

    weight: weakref.ref[Tensor]
    part: slice


class Pieces:
    """Finds the pieces of the tensors that optimizers are given.

    Args:
        models: the top-level modules as they are called, wrappers included.
    """

    def __init__(self, models: Callable[[], Iterable[nn.Module]]) -> None:
        self._models = models
        self._known: static.ByIdentity[Tensor, tuple[int, tuple[Piece, ...]]] = static.ByIdentity()

    def of(self, flat: Tensor) -> tuple[Piece, ...]:
        """Its pieces, in their order; none where it is no such tensor."""
        if type(flat) not in static.TENSORS or flat.dim() != 1 or not flat.is_contiguous() or not _stored(flat):
            return ()
        known = self._known.get(flat)
        if known is not None and known[0] == flat.data_ptr() and all(p.weight() is not None for p in known[1]):
            return known[1]
        return self._known.put(flat, (flat.data_ptr(), tuple(self._search(flat))))[1]

    def _search(self, flat: Tensor) -> Iterator[Piece]:
        memory, begin, size = flat.untyped_storage().data_ptr(), flat.storage_offset(), flat.numel()
        copies = (copy for model in self._models() for copy in _copies(model))
        inside = [
            (start - begin, numel, weight)
            for weight, where, start, numel in copies
            if where == memory and numel and begin <= start and start + numel <= begin + size
        ]
        for start, numel, weight in sorted(inside, key=lambda found: found[:2]):
            yield Piece(weakref.ref(weight), slice(start, start + numel))

    def replicated(self) -> Iterator[Tensor]:
        """Weights that each rank has in whole while their FP32 copies are shared out."""
        for model in self._models():
            for weight in static.parameters(model):
                if not _MARKS.isdisjoint(static.own(weight)):
                    yield weight


#: A weight, and the memory, the first element and the number of elements of a copy of it.
_Copy = tuple[Tensor, int, int, int]


def _copies(model: nn.Module) -> Iterator[_Copy]:
    """What in memory is a copy of which weight of a model."""
    for weight in static.parameters(model):
        own = static.own(weight)
        fragment: Any = static.attribute(own.get("_hp_mapping"), "hp_fragment")
        copies: tuple[Any, ...] = fragment, own.get("main_param"), weight
        for copy in copies:
            if type(copy) in static.TENSORS and copy.is_contiguous() and _stored(copy):
                yield weight, copy.untyped_storage().data_ptr(), copy.storage_offset(), copy.numel()
        if (zero := own.get("_z3_optimizer")) is not None and (found := _of_zero3(weight, own, zero)) is not None:
            yield found
    if type(model).__name__ in _ENGINES:
        yield from _of_flat_groups(model)


def _of_zero3(weight: Tensor, own: dict[str, Any], zero: Any) -> _Copy | None:
    position = static.elements(dict.get(static.attribute(zero, "grad_position", {}), own.get("ds_id")))
    groups = static.elements(static.attribute(zero, "fp32_partitioned_groups_flat"))
    if len(position) != 3 or not {int}.issuperset(map(type, position)) or not 0 <= position[0] < len(groups):
        return None
    flat = groups[position[0]]
    if type(flat) not in static.TENSORS or not _stored(flat):
        return None
    return weight, flat.untyped_storage().data_ptr(), flat.storage_offset() + position[1], position[2]


def _of_flat_groups(engine: nn.Module) -> Iterator[_Copy]:
    """Without ZeRO weights are views of flat 16-bit groups, and the FP32 groups have the same order."""
    optimizer = static.attribute(engine, "optimizer")
    narrow, wide = (static.elements(static.attribute(optimizer, f"{p}_groups_flat")) for p in ("fp16", "fp32"))
    groups = {
        a.untyped_storage().data_ptr(): (a.storage_offset(), b)
        for a, b in zip(narrow, wide, strict=False)
        if type(a) in static.TENSORS and type(b) in static.TENSORS and _stored(a) and _stored(b)
    }
    for weight in static.parameters(engine) if groups else ():
        if type(weight) in static.TENSORS and (found := groups.get(weight.untyped_storage().data_ptr())) is not None:
            begin, flat = found
            start = flat.storage_offset() + weight.storage_offset() - begin
            yield weight, flat.untyped_storage().data_ptr(), start, weight.numel()


def _stored(x: Tensor) -> bool:
    return not x.is_meta and x.untyped_storage().nbytes() > 0
