"""What is read on every step, sampled or not: the gradients the optimizer is about to use, as two numbers."""

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

#: In elements: two microseconds of reading.
_SMALL = 16 * 1024
_BASE: Any = torch._C.TensorBase
_GRADIENT, _CDATA, _VERSION = _BASE.grad.__get__, _BASE._cdata.__get__, _BASE._version.__get__
_EXACT = frozenset(tensor_leaves.EXACT)


@dataclass(frozen=True)
class Look:
    """One reading of gradients: its result, and which tensors it covers, as they were."""

    amax: Deferred
    #: Null: of all an optimizer is about to be asked of, which nobody can have changed since.
    of: tuple[tuple[int, int], ...] | None = None
    #: The largest magnitude of the gradients that came last, where those are not to be waited for.
    late: Deferred = None

    def covers(self, parameters: Iterable[Tensor]) -> bool:
        """Whether it covers the gradients of all of these parameters, unchanged since."""
        return self.of is None or (now := versions(parameters)) == self.of or {*now} <= {*self.of}

    @classmethod
    def at(cls, amax: Deferred, parameters: Iterable[Tensor], late: Deferred = None) -> Look:
        """A reading of the gradients of ``parameters`` as they are now."""
        return cls(amax, versions(parameters), late)


def versions(parameters: Iterable[Tensor]) -> tuple[tuple[int, int], ...]:
    """Which gradients there are, and how often each was written to; by functions of C, up to four times a step."""
    gradients = list(map(_GRADIENT, parameters))
    if _EXACT.issuperset(map(type, gradients)):
        with contextlib.suppress(RuntimeError):  # of inference mode: they have no version
            return tuple(zip(map(_CDATA, gradients), map(_VERSION, gradients), strict=True))
    there = (g for g in gradients if g is not None)
    return tuple((g._cdata, -1 if g.is_inference() else g._version) for g in there)


def largest(amax: Deferred) -> float:
    """An amax, waited for if need be; 0 of no tensors."""
    return 0.0 if (value := read(amax)) is None else value


def gradient_amax(parameters: Iterable[Tensor]) -> Deferred:
    """Largest magnitude over the gradients of some parameters; not finite exactly if one of them is not."""
    return amax(gradients_of(parameters))


def amax(tensors: Iterable[Tensor], known: Layout | None = None) -> Deferred:
    """Largest magnitude over some tensors; not finite exactly if one of them is not. Null without any.

    Args:
        tensors: any.
        known: what they were the last time, to be kept up; on a GPU they are then read by one kernel.
    """
    there = list(tensors)
    if there and (found := _looked_at(there)) is not None:
        return found[0]
    if known is not None and there and _are_on_a_gpu(there):
        seen = known.look(there)
        if seen is None:
            known.learn(there)
            seen = known.look(there)
        if isinstance(seen, Tensor):
            return _arriving(seen)[1]
    dense = list(tensor_leaves.all_plain(there))
    if not dense:
        return None
    if dense[0].is_cpu and (found := native_cpu.look(dense)) is not None:
        return found[0]
    with kernels.apart_from_user_modes():
        return defer(_largest(dense))


def gradient_sentinel(parameters: Iterable[Tensor], known: Layout | None = None) -> tuple[Deferred, Deferred] | None:
    """L2 norm and amax over the gradients of some parameters, without waiting for a device.

    Args:
        parameters: those of one optimizer, with their gradients still as the backward pass left them.
        known: what their gradients were the last time, to be kept up.

    Returns:
        Both as numbers that may still be on their way; amax is finite exactly if every gradient is. Null where there is
        no gradient.
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
        found = _looked_at(gradients)
        if known is not None and (found is not None or _are_on_a_gpu(gradients)):
            known.learn(gradients)
            found = known.look(gradients) if found is None else found
    if found is None:
        return _gradient_sentinel(gradients)
    return _arriving(found) if isinstance(found, Tensor) else (math.sqrt(found[1]), found[0])


def _are_on_a_gpu(tensors: list[Tensor]) -> bool:
    """Whether the kernel of one launch may be able to read them: torch's own tensors, of whatever layout."""
    return tensors[0].is_cuda and _EXACT.issuperset(map(type, tensors))


def _arriving(found: Tensor) -> tuple[Deferred, Deferred]:
    """L2 norm and amax from amax and the sum of squares of each dtype, shape (dtypes, 2), on their way to the host."""
    with kernels.apart_from_user_modes():
        numbers = deferred(found.flatten(), by_drain=False)

    def norm() -> float:
        return math.sqrt(sum(numbers()[1::2]))

    return norm, lambda: _worst(numbers()[::2])


def _worst(values: Sequence[float]) -> float:
    """The largest; NaN if there is one."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def _gradient_sentinel(gradients: list[Tensor]) -> tuple[Deferred, Deferred] | None:
    dense = list(tensor_leaves.all_plain(gradients))
    if not dense:
        return None
    if dense[0].is_cpu and (found := native_cpu.look(dense)) is not None:
        return math.sqrt(found[1]), found[0]
    with kernels.apart_from_user_modes():
        if dense[0].is_cpu:
            dense = _joined([g if g.dtype in {torch.float32, torch.float64} else g.to(torch.float32) for g in dense])
        return defer(torch.linalg.vector_norm(_norms(dense, 2.0))), defer(_largest(dense))


def merged(one: tuple[Deferred, Deferred], other: tuple[Deferred, Deferred]) -> tuple[Deferred, Deferred]:
    """L2 norm and amax of all gradients from those of two parts."""
    both = one, other
    return (
        lambda: math.hypot(*(read(norm) or 0.0 for norm, _ in both)),
        lambda: _worst([read(amax) or 0.0 for _, amax in both]),
    )


def are_sharded(parameters: Iterable[Tensor]) -> bool:
    """Whether this rank has only a part of some of these parameters, or of their gradients."""
    tensors = list(parameters)
    kinds = {*map(type, tensors), *map(type, map(_GRADIENT, tensors))}
    return any(kind.__name__ in ("DTensor", "FlatParameter") for kind in kinds)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those there are, by functions of C: this runs on every step."""
    return [g for g in map(_GRADIENT, parameters) if g is not None]


def _looked_at(tensors: list[Tensor]) -> tuple[float, float] | None:
    """What the library finds, where there is nothing special about any of them; null elsewhere."""
    if not tensors[0].is_cpu or torch._C._functorch.maybe_current_level() is not None:
        return None
    if not _EXACT.issuperset(map(type, tensors)):
        return None
    return native_cpu.look(tensors)


def _norms(tensors: list[Tensor], order: float) -> Tensor:
    """The norm of each, in no particular order: a few launches per dtype and device, and no copy of a 16-bit tensor."""
    home = tensors[0].device
    exact = torch.float64 if home.type in {"cpu", "cuda"} else torch.float32
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        known = x if x.element_size() > 1 else x.float()  # float8 has none
        alike.setdefault((x.device, known.dtype), []).append(known)
    parts = []
    with torch.no_grad():
        for (_, dtype), group in alike.items():
            wide = torch.float32 if dtype.itemsize < 4 else None
            parts.append(torch.stack(torch._foreach_norm(group, order, dtype=wide)).to(home, exact))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(tensors: list[Tensor]) -> list[Tensor]:
    """On a CPU the small FP32 ones are put together into one: there a call costs more than their elements do."""
    small = [t for t in tensors if t.is_cpu and t.dtype == torch.float32 and t.numel() <= _SMALL]
    if len(small) < 2:
        return tensors
    few = {id(t) for t in small}
    return [t for t in tensors if id(t) not in few] + [torch.cat([t.reshape(-1) for t in small])]


def _largest(gradients: list[Tensor]) -> Tensor:
    """Largest magnitude; NaN if there is one."""
    if not gradients[0].is_cpu:
        return _norms(gradients, math.inf).max()
    gradients = [g.detach() if g.element_size() > 1 else g.detach().float() for g in gradients]  # float8 has neither
    ends = [end for g in gradients for end in torch.aminmax(g)]  # the infinity norm takes fifteen times as long
    return torch.stack([end.to("cpu", torch.float64) for end in ends]).abs().max()
