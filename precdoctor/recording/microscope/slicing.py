"""Traces a bad value back to the ops that made it: a slice through the trace that follows bad operands only.

Bad values that never reach the target (masks, values that a ``where`` discarded) are not visited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from precdoctor.numerics.nonfinite import FILLS, op_names, plain_name
from precdoctor.recording.microscope.tracer import External, OpRecord, Source
from precdoctor.recording.ops.tensor_facts import NAN, NEG_INF, POS_INF

#: Maximum number of reported ops on the path, and of ops that feed the origins; how far back these are searched.
_MAX_PATH = 12
_MAX_FEEDING = 12
_FEEDING_DEPTH = 4


@dataclass(frozen=True)
class Slice:
    """The ops and tensors from which a bad value came.

    Attributes:
        origins: indices of ops in the slice that made something bad of finite operands.
        externals: bad tensors from before the trace, with the first op that read each.
        path: indices of the slice's ops in order, from the first origin to the bad value; empty if no op made it.
        feeding: indices of ops that made the origins' operands, nearest first.
    """

    origins: tuple[int, ...] = ()
    externals: tuple[tuple[External, int], ...] = ()
    path: tuple[int, ...] = ()
    feeding: tuple[int, ...] = ()

    def made_worse(self, records: Sequence[OpRecord], kinds: int = NAN | POS_INF) -> bool:
        """Return whether an op on the path made NaN or ``+inf`` of nothing worse than a mask's ``-inf``."""
        return any(records[i].spoils_mask(kinds) for i in self.path)

    def is_filled(self, records: Sequence[OpRecord]) -> bool:
        """Return whether all of it begins with constants that were filled in, as a mask does."""
        return bool(self.origins) and all(plain_name(records[i].op) in FILLS for i in self.origins)

    def overflowed(self, records: Sequence[OpRecord]) -> bool:
        """Return whether an origin made NaN or ``+inf``: what follows from it is not a mask, even if it is ``-inf``."""
        return any(records[i].bad_out & ~NEG_INF for i in self.origins)

    @property
    def wanted(self) -> frozenset[int]:
        """Indices of all ops to be reported."""
        return frozenset((*self.origins, *self.path, *self.feeding, *(index for _, index in self.externals)))


def slice_back(records: Sequence[OpRecord], targets: Iterable[Source]) -> Slice:
    """Follow bad operands back from ``targets``; return an empty slice if no op made any of them.

    Args:
        records: of a trace, by index.
        targets: sources of the bad tensors.
    """
    waiting = [i for t in targets if not isinstance(t, External) for i in t if records[i].bad_out]
    met: set[int] = set()
    external: dict[External, int] = {}
    while waiting:
        index = waiting.pop()
        if index in met:
            continue
        met.add(index)
        record = records[index]
        for source, bad in zip(record.sources, record.bad_in, strict=False):
            if not bad:
                continue
            if isinstance(source, External):
                external[source] = min(index, external.get(source, index))
            else:
                waiting += [i for i in source if i < index and records[i].bad_out]
    origins = tuple(sorted(i for i in met if records[i].suspect))
    path = _path(records, sorted(met))
    feeding = _feeding(records, origins or path[:1])
    meeting = next((i for i in sorted(met) if records[i].phase == "backward"), None)
    if meeting is not None and meeting not in origins:  # a bad forward result met a gradient: report both operands
        feeding = tuple(dict.fromkeys((*feeding, *_feeding(records, (meeting,)))))
    return Slice(origins, tuple(external.items()), path, feeding)


def _path(records: Sequence[OpRecord], indices: Sequence[int]) -> tuple[int, ...]:
    """Return the slice's ops without copies and views; if there are too many, its beginning and end."""
    shown = [i for i in indices if records[i].suspect or plain_name(records[i].op) not in _MOVING] or list(indices)
    if len(shown) <= _MAX_PATH:
        return tuple(shown)
    return (*shown[: _MAX_PATH - 2], *shown[-2:])


def _feeding(records: Sequence[OpRecord], origins: Sequence[int]) -> tuple[int, ...]:
    """Return the ops that made the origins' operands, breadth first."""
    found: list[int] = []
    level = list(origins[:4])
    for _ in range(_FEEDING_DEPTH):
        above: list[int] = []
        for index in level:
            for source in records[index].sources:
                if isinstance(source, External):
                    continue
                makers = [i for i in source if i < index and i not in found and i not in above]
                above += makers[-2:]
        found += above
        level = above
    return tuple(found[:_MAX_FEEDING])


_MOVING = op_names(
    "view _unsafe_view reshape transpose t permute expand expand_as slice select unsqueeze squeeze detach "
    "alias split split_with_sizes chunk unbind narrow as_strided clone contiguous cat stack index gather "
    "select_backward slice_backward unfold diagonal repeat flatten lift_fresh view_as_real view_as_complex "
    "_reshape_alias"
)
