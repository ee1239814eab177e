"""Finding the tensors inside what modules take and return, and the plain tensor inside what a tensor may be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from precdoctor.recording import static

_LAZY = (UninitializedParameter, UninitializedBuffer)
#: Types without behaviour of their own. Asked for by identity: ``isinstance`` with a parameter's runs Python code.
EXACT = (Tensor, torch.nn.Parameter)
_MAX_DEPTH = 3
_MAX_LEAVES = 64


def tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists, mappings and dataclasses, with dotted names (``hidden_states.3``).

    A lone tensor is named ``prefix``. At most three levels deep and 64 tensors: caches and graphs are not outputs.
    """
    return itertools.islice(_walk(value, prefix, 0), _MAX_LEAVES)


def floating(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Those of :func:`tensors` that hold floating-point or complex numbers, as long as they are there to be read.

    Inside functorch transforms no tensor is: its values are known to no single kernel call.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        return iter(())
    if type(value) is Tensor:  # most often
        return iter((("", value),) if counts(value) else ())
    if type(value) is dict and len(value) == 1:  # of arguments, most often
        ((name, x),) = value.items()
        if type(x) is Tensor:
            return iter(((str(name) if type(name) is int else static.text(name), x),) if counts(x) else ())
    return ((name, x) for name, x in tensors(value) if counts(x))


def counts(x: Tensor) -> bool:
    """Whether its elements are floating-point numbers, or pairs of them."""
    return x.is_floating_point() or x.is_complex()


def _walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    kind = type(value)
    if issubclass(kind, Tensor):
        yield name, value
    elif depth < _MAX_DEPTH and kind not in static.KEYS:
        for key, item in static.items(value):
            yield from _walk(item, f"{name}.{key}" if name else key, depth + 1)


def buffer_stamp(owner: torch.nn.Module, name: str, buffer: Tensor) -> object:
    """Differs once somebody has written to a buffer, or has put another tensor in its place.

    Batch norm's kernels write to running statistics without telling the version counter: in training those always
    count as written to.
    """
    if name in ("running_mean", "running_var") and static.is_training(owner):
        return object()
    return buffer._cdata, buffer._version


def version(x: Tensor) -> int:
    """Counts the writes to a tensor's memory; -1 for inference tensors, which do not count them."""
    # A lazy module's parameter has no shape before the first call, and refuses whatever it is asked.
    return -1 if (type(x) not in EXACT and isinstance(x, _LAZY)) or x.is_inference() else x._version


def has_graph(x: Tensor) -> bool:
    """Whether ``x``, or what it is a view of, was made with a gradient.

    A view whose base has been written to is not asked for ``grad_fn`` or ``is_leaf``: that makes its node, or raises.
    """
    base = x._base
    if base is not None:
        return x.requires_grad or (base.requires_grad and not base.is_leaf)
    return x.requires_grad and not x.is_leaf


def is_transformed(x: Tensor) -> bool:
    """Whether ``x`` stands for another tensor inside a functorch transform, and has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_wrapped(x: Tensor) -> bool:
    """Whether ``x`` is a subclass that computes by itself (DTensor, FakeTensor, quantised tensors)."""
    return computes_itself(type(x))


def computes_itself(kind: type) -> bool:
    """The same, by the tensor's type."""
    if kind in EXACT:
        return False
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not Tensor.__torch_dispatch__


def plain(x: Tensor) -> Tensor | None:
    """The dense floating-point tensor whose values count for ``x``, or null when there is none.

    DTensors give their local shard, sparse tensors their coalesced values, complex ones their real and imaginary parts.
    Fake, functorch-wrapped, quantised, nested, meta, lazy and empty tensors and other subclasses give null, and so do
    tensors whose memory is given back: FSDP empties the storage of gathered parameters, and to read them is a crash.
    """
    exact = type(x) in EXACT
    if not exact and is_wrapped(x):
        local: Any = static.attribute(x, "_local_tensor")
        if type(x).__name__ != "DTensor" or not issubclass(type(local), Tensor):
            return None
        x = local
    if torch._C._functorch.maybe_current_level() is not None or (not exact and isinstance(x, _LAZY)):
        return None
    if x.layout is not torch.strided:
        if x.layout is not torch.sparse_coo:
            return None
        x = x.detach().coalesce().values()
    if x.is_meta or x.is_nested or x.numel() == 0 or x.untyped_storage().nbytes() == 0:
        return None
    if x.dtype.is_complex:
        x = torch.view_as_real(x.detach().resolve_conj())
    return x if x.dtype.is_floating_point else None
