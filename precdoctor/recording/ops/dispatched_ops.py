"""Facts of an op that torch dispatches: its name, what it writes to, whose memory its tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.model import tensor_leaves

#: The number the next autograd node will get; the node of a running forward op has the one before.
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined] # not in __all__

#: torch's own, as it is before the recorder listens to the user's calls of it.
take_gradients: Callable[..., Any] = getattr(torch.autograd.grad, "__wrapped__", torch.autograd.grad)

#: They leave memory as it was before somebody else used it.
UNINITIALISED = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"))
#: What they write to is not read by them.
OVERWRITING = frozenset(("copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "exponential_", "random_"))


def storage_key(x: Tensor) -> int | None:
    """Equal for tensors that share memory, as long as both are alive; None without memory of its own."""
    if x.layout is not torch.strided or tensor_leaves.is_wrapped(x):
        return None
    return int(x.untyped_storage()._cdata)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in the arguments or results of an op, which nests lists only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The floating-point arguments an op changes in place."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tensors_in(value) if x.is_floating_point() or x.is_complex()]
    return found or (_statistics(func, args) if op_name(func).endswith("batch_norm") else found)


def _statistics(func: Any, args: Any) -> list[Tensor]:
    """Running statistics, which older batch norm ops write to without saying so."""
    named = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)}
    if not named.get("training", named.get("train")):
        return []
    return [x for n in ("running_mean", "running_var") if isinstance(x := named.get(n), Tensor)]


def is_out_variant(func: Any) -> bool:
    """Whether the op writes to an ``out=`` argument."""
    return any(a.is_out for a in func._schema.arguments)


def op_name(func: Any) -> str:
    """``add_`` of ``aten.add_.Tensor``."""
    return str(func.overloadpacket.__name__)
