"""One op as a scan sees it: operands, results, place in the code, and its FP64 results."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from precdoctor.recording import kernels
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.model import tensor_leaves
from precdoctor.recording.ops.dispatched_ops import op_name, tensors_in
from precdoctor.recording.ops.op_facts import in_fp64
from precdoctor.recording.ops.source_lines import Line

#: Least number of elements of a channel: through a single one either everything passes or nothing.
_PER_CHANNEL = 8
HALF = frozenset((torch.float16, torch.bfloat16))
FLOATS = HALF | {torch.float32}


@dataclass(frozen=True)
class Where:
    """The place of an op: top-level module, module below it, its line, and the user's line behind one of a library."""

    root: str
    module: str
    line: Line | None
    caller: Line | None = None

    @property
    def calling(self) -> dict[str, Any]:
        """``caller`` as data of a fact; empty if the line is the user's own."""
        return {} if self.caller is None else {"caller": {"file": self.caller.shown, "line": self.caller.number}}


@dataclass(frozen=True)
class Counts:
    """Exact counts of one tensor; extremes are magnitudes of finite elements, None if there are none."""

    numel: int
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    at_max: int
    amax: float | None
    amin_nonzero: float | None

    @property
    def bad(self) -> int:
        """Number of non-finite elements."""
        return self.nan + self.pos_inf + self.neg_inf


def count(x: Tensor) -> Counts | None:
    """Count the elements of a tensor; waits for its device. None if it has no dense memory that can be read."""
    dense = tensor_leaves.plain(x)
    if dense is None:
        return None
    ints, floats = kernels.measured(dense.detach())
    finite = int(ints[at.NUMEL] - ints[at.NAN] - ints[at.POS_INF] - ints[at.NEG_INF])
    return Counts(
        numel=int(ints[at.NUMEL]),
        nan=int(ints[at.NAN]),
        pos_inf=int(ints[at.POS_INF]),
        neg_inf=int(ints[at.NEG_INF]),
        zero=int(ints[at.HIST]),
        at_max=int(ints[at.AT_MAX]),
        amax=float(floats[at.AMAX]) if finite else None,
        amin_nonzero=float(floats[at.AMIN]) if finite > ints[at.HIST] else None,
    )


def beside_channels(x: Tensor) -> Iterator[list[int]]:
    """Yield the other dimensions for each that may be the channels: of four the second, else the first and the last.

    A dimension with fewer than 8 elements per channel is left out.
    """
    for dim in {1} if x.dim() == 4 else {0, x.dim() - 1} if x.dim() > 1 else ():
        if x.numel() >= _PER_CHANNEL * x.shape[dim]:
            yield [d for d in range(x.dim()) if d != dim]


@dataclass
class Call:
    """An op that has run.

    Attributes:
        phase: of the step, as :meth:`WindowMode.phase` returns it.
        swapped: copies of operands from before an in-place op, by ``id``.
        whole: its results, including tensors written in place.
        limit: it is not run again if its operands have more elements together.
    """

    func: Any
    args: Any
    kwargs: Any
    phase: str
    where: Where
    micro_step: int
    swapped: Mapping[int, Tensor]
    whole: Sequence[Tensor]
    limit: int
    _counts: dict[int, Counts | None] = field(init=False, default_factory=dict)

    @property
    def op(self) -> str:
        """The full name, such as ``aten.mul_.Tensor``."""
        return str(self.func)

    @functools.cached_property
    def name(self) -> str:
        """The name without namespace and overload: ``mul_`` for ``aten.mul_.Tensor``."""
        return op_name(self.func)

    @functools.cached_property
    def plain_name(self) -> str:
        """The name without the trailing underscore of in-place ops."""
        return self.name.rstrip("_")

    @functools.cached_property
    def results(self) -> list[Tensor]:
        """Its floating-point results."""
        return [x for x in self.whole if x.is_floating_point()]

    @functools.cached_property
    def operands(self) -> list[Tensor]:
        """Its floating-point operands; after an in-place op these objects hold its result (see :meth:`before`)."""
        return [x for x in tensors_in((self.args, self.kwargs)) if x.is_floating_point()]

    def before(self, x: Tensor) -> Tensor:
        """Return an operand's values as the op read them."""
        return self.swapped.get(id(x), x)

    def counts(self, x: Tensor) -> Counts | None:
        """Return the counts of a tensor, computed once per call."""
        if id(x) not in self._counts:
            self._counts[id(x)] = count(x)
        return self._counts[id(x)]

    def operand_counts(self) -> list[Counts]:
        """Return the counts of the operands as the op read them."""
        return [c for x in self.operands if (c := self.counts(self.before(x))) is not None]

    @functools.cached_property
    def exact(self) -> list[Tensor] | None:
        """Its results in FP64 from the operands it read; None if it cannot be run again."""
        return self.again({})

    def again(self, replaced: Mapping[int, Tensor]) -> list[Tensor] | None:
        """Return its results in FP64 with some operands replaced, by ``id``; None if it cannot be run again."""
        result = self._in_fp64(replaced)
        found = [x for x in tensors_in(result) if x.is_floating_point()] if result is not None else []
        same = len(found) == len(self.results) and all(
            a.dtype == torch.float64 and a.shape == b.shape for a, b in zip(found, self.results, strict=True)
        )
        return found if same else None

    def decided(self, replaced: Mapping[int, Tensor]) -> Tensor | None:
        """Return the result of a comparison run in FP64 with some operands replaced, by ``id``; None for other ops."""
        result = self._in_fp64(replaced)
        return result if isinstance(result, Tensor) and result.dtype == torch.bool else None

    def _in_fp64(self, replaced: Mapping[int, Tensor]) -> Any:
        return in_fp64(self.func, self.args, self.kwargs, {**self.swapped, **replaced}, limit=self.limit)
