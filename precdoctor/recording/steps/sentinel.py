"""Reads the gradients that the optimizer is about to use, on every step, as two numbers: L2 norm and amax."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.kernels import native_cpu
from precdoctor.recording.kernels.list_layout import Layout
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.slots.deferred import Deferred, defer, deferred, read

#: Most elements of a tensor that :func:`_joined` copies: reading it takes two microseconds, less than a call.
_SMALL = 16 * 1024
_BASE: Any = torch._C.TensorBase
_GRADIENT, _CDATA, _VERSION = _BASE.grad.__get__, _BASE._cdata.__get__, _BASE._version.__get__


@dataclass(frozen=True)
class Look:
    """One reading of gradients: its result, and which gradients it covers in which version."""

    amax: Deferred
    #: Address and version counter of each gradient; None: all of the optimizer about to step, not changed since.
    of: tuple[tuple[int, int], ...] | None = None
    #: Amax of the gradients that arrived last, if the guard must not wait for them; else None.
    late: Deferred = None

    def covers(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether the reading covers the gradients of all these parameters, unchanged."""
        return self.of is None or (now := versions(parameters)) == self.of or {*now} <= {*self.of}

    @classmethod
    def at(cls, amax: Deferred, parameters: Iterable[Tensor], late: Deferred = None) -> Look:
        """Return a reading that covers the current gradients of ``parameters``."""
        return cls(amax, versions(parameters), late)


def versions(parameters: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return address and version counter of each gradient. Calls C functions only: runs up to four times per step."""
    gradients = list(map(_GRADIENT, parameters))
    if tensor_leaves.EXACT.issuperset(map(type, gradients)):
        with contextlib.suppress(RuntimeError):  # tensors of inference mode have no version
            return tuple(zip(map(_CDATA, gradients), map(_VERSION, gradients), strict=True))
    present = (g for g in gradients if g is not None)
    return tuple((g._cdata, -1 if g.is_inference() else g._version) for g in present)


def largest(amax: Deferred) -> float:
    """Return an amax, after waiting for it if need be; 0 if there were no tensors."""
    return 0.0 if (value := read(amax)) is None else value


def amax(tensors: Iterable[Tensor], known: Layout | None = None) -> Deferred:
    """Return the amax of some tensors; it is finite if and only if all elements are. None without tensors.

    Args:
        tensors: any.
        known: layout of the tensors at the last call; updated. On a GPU it lets one kernel read them all.
    """
    present = list(tensors)
    if present and (found := _native_look(present)) is not None:
        return found[0]
    if known is not None and present and _are_on_a_gpu(present):
        seen = known.look(present)
        if seen is None:
            known.learn(present)
            seen = known.look(present)
        if isinstance(seen, Tensor):
            return _arriving(seen)[1]
    dense = list(tensor_leaves.all_plain(present))
    if not dense:
        return None
    if dense[0].is_cpu and (found := native_cpu.look(dense)) is not None:
        return found[0]
    with kernels.apart_from_user_modes():
        return defer(_largest(dense))


def gradient_sentinel(
    parameters: Iterable[Tensor], known: Layout | None = None, *, by_drain: bool = False
) -> tuple[Deferred, Deferred] | None:
    """Return L2 norm and amax of the parameters' gradients, without waiting for a device.

    Args:
        parameters: of one optimizer, with the gradients as the backward pass left them.
        known: layout of the gradients at the last call; updated.
        by_drain: only the drain waits for the numbers, see :func:`defer`; without ``known``.

    Returns:
        Two numbers that may still be on their way; amax is finite if and only if all gradients are. None without any.
    """
    gradients = list(map(_GRADIENT, parameters))
    if torch._C._functorch.maybe_current_level() is not None:
        known = None
    found = known.look(gradients) if known is not None else None
    if found is None:
        some, gradients = len(gradients), [g for g in gradients if g is not None]
        if known is not None and len(gradients) < some:
            found = known.look(gradients)
    if found is None and gradients:
        found = _native_look(gradients)
        if known is not None and (found is not None or _are_on_a_gpu(gradients)):
            known.learn(gradients)
            found = known.look(gradients) if found is None else found
    if found is None:
        return _gradient_sentinel(gradients, by_drain=by_drain)
    return _arriving(found) if isinstance(found, Tensor) else (math.sqrt(found[1]), found[0])


def _are_on_a_gpu(tensors: list[Tensor]) -> bool:
    """Return whether one kernel launch may be able to read all tensors: torch's own types on a GPU, any layout."""
    return tensors[0].is_cuda and tensor_leaves.EXACT.issuperset(map(type, tensors))


def _arriving(found: Tensor) -> tuple[Deferred, Deferred]:
    """Return L2 norm and amax from a tensor of shape (dtypes, 2), amax and sum of squares, on its way to the host."""
    with kernels.apart_from_user_modes():
        numbers = deferred(found.flatten(), by_drain=False)

    def norm() -> float:
        return math.sqrt(sum(numbers()[1::2]))

    return norm, lambda: _worst(numbers()[::2])


def _worst(values: Sequence[float]) -> float:
    """Return the largest value; NaN if there is one."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _gradient_sentinel(gradients: list[Tensor], *, by_drain: bool) -> tuple[Deferred, Deferred] | None:
    """Return L2 norm and amax of gradients that the fast paths do not take."""
    dense = list(tensor_leaves.all_plain(gradients))
    if not dense:
        return None
    if dense[0].is_cpu and (found := native_cpu.look(dense)) is not None:
        return math.sqrt(found[1]), found[0]
    with kernels.apart_from_user_modes():
        if dense[0].is_cpu:
            dense = _joined([g if g.dtype in {torch.float32, torch.float64} else g.to(torch.float32) for g in dense])
        norm = defer(torch.linalg.vector_norm(_norms(dense, 2.0)), by_drain=by_drain)
        return norm, defer(_largest(dense), by_drain=by_drain)


def merged(one: tuple[Deferred, Deferred], other: tuple[Deferred, Deferred]) -> tuple[Deferred, Deferred]:
    """Return L2 norm and amax of all gradients, from those of two parts."""
    both = one, other
    return (
        lambda: math.hypot(*(read(norm) or 0.0 for norm, _ in both)),
        lambda: _worst([read(amax) or 0.0 for _, amax in both]),
    )


def are_sharded(parameters: Iterable[Tensor]) -> bool:
    """Return whether this rank holds only a part of some of these parameters or gradients."""
    tensors = list(parameters)
    kinds = {*map(type, tensors), *map(type, map(_GRADIENT, tensors))}
    return any(kind.__name__ in ("DTensor", "FlatParameter") for kind in kinds)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist. Calls C functions only: runs on every step."""
    return [g for g in map(_GRADIENT, parameters) if g is not None]


def _native_look(tensors: list[Tensor]) -> tuple[float, float] | None:
    """Return amax and sum of squares from the C library; None if a tensor is not a plain one on the CPU."""
    if not tensors[0].is_cpu or torch._C._functorch.maybe_current_level() is not None:
        return None
    if not tensor_leaves.EXACT.issuperset(map(type, tensors)):
        return None
    return native_cpu.look(tensors)


def _norms(tensors: list[Tensor], order: float) -> Tensor:
    """Return the norm of each tensor, in any order: a few launches per dtype and device, no copy of 16-bit ones."""
    home = tensors[0].device
    exact = torch.float64 if home.type in {"cpu", "cuda"} else torch.float32
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        known = x if x.element_size() > 1 else x.float()  # float8 has no norm
        alike.setdefault((x.device, known.dtype), []).append(known)
    parts = []
    with torch.no_grad():
        for (_, dtype), group in alike.items():
            wide = torch.float32 if dtype.itemsize < 4 else None
            parts.append(torch.stack(torch._foreach_norm(group, order, dtype=wide)).to(home, exact))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """Join small FP32 tensors on the CPU into one, because a call costs more there than their elements."""
    small = [t for t in tensors if t.is_cpu and t.dtype == torch.float32 and t.numel() <= _SMALL]
    if len(small) < 2:
        return tensors
    few = {id(t) for t in small}
    return [t for t in tensors if id(t) not in few] + [torch.cat([t.reshape(-1) for t in small])]


def _largest(gradients: list[Tensor]) -> Tensor:
    """Return the amax as a tensor; NaN if there is a NaN."""
    if not gradients[0].is_cpu:
        return _norms(gradients, math.inf).max()
    gradients = [g.detach() if g.element_size() > 1 else g.detach().float() for g in gradients]  # ops lack float8
    ends = [end for g in gradients for end in torch.aminmax(g)]  # the infinity norm takes 15 times as long
    return torch.stack([end.to("cpu", torch.float64) for end in ends]).abs().max()
