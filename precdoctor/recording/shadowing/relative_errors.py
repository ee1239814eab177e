"""The relative L2 error of a tensor against its reference, and the largest errors of each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def relative_l2(found: Tensor, reference: Tensor) -> float:
    """Return ``||found - reference|| / ||reference||`` over elements finite in both, with norms in FP64.

    Infinite if an element is finite only in the reference (it overflowed), or if the reference is all zeros and
    ``found`` is not; 0 if both are zero. NaN if shapes differ or nothing can be compared.
    """
    if found.shape != reference.shape:
        return math.nan
    x, y = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (found.detach(), reference.detach()))
    wide = torch.promote_types(x.dtype, y.dtype) if min(x.itemsize, y.itemsize) > 1 else torch.float32
    x, y = x.to(wide), y.to(wide)
    error, size = _norm(x - y), _norm(y)
    if not (math.isfinite(error) and math.isfinite(size)):
        here, there = torch.isfinite(x), torch.isfinite(y)
        if bool((there & ~here).any()):
            return math.inf
        both = here & there
        if not bool(both.any()):
            return math.nan
        error, size = _norm((x - y)[both]), _norm(y[both])
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size


def ratio(x: Tensor, y: Tensor) -> float:
    """Return ``||x|| / ||y||`` of finite tensors; if ``y`` is all zeros: infinite, or 0 if ``x`` is also zero."""
    above, below = _norm(x.detach()), _norm(y.detach())
    return above / below if below > 0.0 else math.inf if above > 0.0 else 0.0


def _norm(x: Tensor) -> float:
    """Return the L2 norm, summed in FP64; 0 for an empty tensor."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) if x.numel() else 0.0


@dataclass
class Point:
    """One kind of tensor of one module: its largest errors over calls and names.

    Attributes:
        local: against the reference of this piece of code alone, given the tensors of the reduced replay.
        accumulated: against the reference computed in the wide format from the beginning.
        given: the largest accumulated error among the piece's inputs, at the call with the largest ``accumulated``.
        name: of the tensor with the largest local error, else the largest accumulated one.
    """

    name: str = ""
    dtype: str = ""
    numel: int = 0
    local: float | None = None
    accumulated: float | None = None
    given: float | None = None

    def add_local(self, error: float, name: str, x: Tensor) -> None:
        """Keep the error if it is the largest local one."""
        if not math.isnan(error) and (self.local is None or error > self.local):
            self.local = error
            self._describe(name, x)

    def add_accumulated(self, error: float, given: float | None, name: str, x: Tensor) -> None:
        """Keep the error, with that of its inputs, if it is the largest accumulated one."""
        if not math.isnan(error) and (self.accumulated is None or error > self.accumulated):
            self.accumulated, self.given = error, given
            if self.local is None:
                self._describe(name, x)

    def _describe(self, name: str, x: Tensor) -> None:
        self.name, self.dtype, self.numel = name, str(x.dtype).removeprefix("torch."), x.numel()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as logged, without those that are None."""
        return {k: v for k, v in vars(self).items() if v is not None}


@dataclass
class Layer:
    """The measurements at one module, over all its calls."""

    module: str
    kind: str
    #: The module from whose forward it is first called; None for the root.
    parent: str | None
    order: int
    leaf: bool
    calls: int = 0
    points: dict[str, Point] = field(default_factory=dict)

    def point(self, kind: str) -> Point:
        return self.points.setdefault(kind, Point())

    def as_dict(self) -> Mapping[str, Any]:
        """Return the ``data`` of the layer's event."""
        plain = {"order": self.order, "class": self.kind, "parent": self.parent, "calls": self.calls, "leaf": self.leaf}
        return {"what": "layer", **plain, **{k: p.as_dict() for k, p in self.points.items()}}
