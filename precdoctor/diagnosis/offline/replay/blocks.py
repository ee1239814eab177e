"""What a block format would have done to the tensors of a recorded run.

Every block has a scale of its own, taken from itself, so there is no history and nothing to go stale: the relative
histograms of all steps add up, and one prediction per tensor speaks for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from precdoctor.diagnosis.offline.replay.amax_log import vectors
from precdoctor.diagnosis.offline.replay.fp8 import KINDS, RecipeReplay, TensorReplay
from precdoctor.diagnosis.survey.histogram_columns import exponents
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import CorruptRunError, NothingRecordedError, UsageError
from precdoctor.numerics.block_prediction import predict_blocks
from precdoctor.numerics.blocks import BlockFormat, BlockHistogram
from precdoctor.numerics.cells import Estimate
from precdoctor.numerics.histogram import ExponentHistogram

_KEY = ("root", "module", "kind", "name")


@dataclass
class _Sum:
    """One tensor's block histograms added up."""

    below: np.ndarray[tuple[int], np.dtype[np.int64]]
    amax: ExponentHistogram
    largest: float
    steps: set[int]

    def histogram(self, size: int) -> BlockHistogram:
        return BlockHistogram(size, tuple(self.below.tolist()), self.amax)


def replay_blocks(
    view: RunView,
    fmt: BlockFormat,
    *,
    kinds: Sequence[str] = KINDS,
    wanted: Callable[[str], bool] | None = None,
    steps: tuple[int | None, int | None] = (None, None),
) -> RecipeReplay:
    """Replays a log with a block format; arguments as for :func:`.fp8.replay_recipes`.

    A tensor scale (NVFP4) is taken from the largest amax of all steps, so scales that underflow are overestimated.

    Raises:
        UsageError: such blocks are never recorded.
        NothingRecordedError: they were not recorded in this run.
        CorruptRunError: histograms that cannot be true.
    """
    height, size = fmt.block
    if height != 1:
        raise UsageError(
            f"{fmt.name} has blocks of {height}x{size}, which are not recorded; "
            "recorded are 1x16, 1x32 and 1x128: mxfp8, nvfp4, tile128"
        )
    sums = _sums(view, size, kinds, wanted, steps)
    if not sums:
        raise NothingRecordedError(
            f"{view.run.path} holds no block{size}_hist of kind {', '.join(kinds)} that was asked for; "
            f"{fmt.name} cannot be replayed"
        )
    tensors = [_tensor(key, total, fmt) for key, total in sums.items()]
    tensors.sort(key=lambda t: (-t[1].saturated.estimate, -t[1].flushed.estimate, t[1].module, t[1].kind, t[1].name))
    return RecipeReplay(
        recipe=fmt.name,
        tensors=tuple(t for _, t in tensors),
        flushed=_mean([(n, t.flushed) for n, t in tensors]),
        saturated=_mean([(n, t.saturated) for n, t in tensors]),
        stale_tensors=0,
        history=False,
    )


def _sums(
    view: RunView,
    size: int,
    kinds: Sequence[str],
    wanted: Callable[[str], bool] | None,
    steps: tuple[int | None, int | None],
) -> dict[tuple[str, ...], _Sum]:
    names = [f"block{size}_hist", f"block{size}_amax_lo", f"block{size}_amax_hist"]
    first, stop = steps
    where = [("step", ">=", first or 0), *([("step", "<", stop)] if stop is not None else [])]
    sums: dict[tuple[str, ...], _Sum] = {}
    left_out = set(vectors(view))
    for frame in view.scan([*_KEY, "amax", *names], kinds, where=where):
        for *key, step, amax, below, lo, peaks in frame.loc[
            frame[names[0]].notna(), [*_KEY, "step", "amax", *names]
        ].itertuples(index=False, name=None):
            named = tuple(map(str, key))
            if named in left_out or (wanted is not None and not wanted(named[1])):
                continue
            nothing = ExponentHistogram.of(None, None)
            total = sums.setdefault(named, _Sum(np.zeros(BlockHistogram.LIMIT, dtype=np.int64), nothing, 0.0, set()))
            if len(below) > BlockHistogram.LIMIT or min(below, default=0) < 0:
                raise CorruptRunError(f"the log is damaged: {names[0]} has {len(below)} entries, or one below zero")
            total.below[: len(below)] += below
            total.amax = total.amax.merge(exponents(names[2], lo, peaks))
            total.largest = max(total.largest, amax if amax is not None and amax < math.inf else 0.0)
            total.steps.add(int(step))
    return sums


def _tensor(key: tuple[str, ...], total: _Sum, fmt: BlockFormat) -> tuple[int, TensorReplay]:
    prediction = predict_blocks(total.histogram(fmt.block[1]), fmt, amax=total.largest or None)
    root, module, kind, name = key
    return prediction.elements, TensorReplay(
        root=root,
        module=module,
        kind=kind,
        name=name,
        format=fmt.element.name,
        steps=len(total.steps),
        flushed=prediction.flushed,
        saturated=prediction.saturated,
        stale_steps=0,
        worst=None,
        padding_binades=prediction.headroom_binades.estimate,
        kept_steps=0,
        cold_steps=0,
        non_finite_steps=0,
        sparse_steps=0,
    )


def _mean(shares: Sequence[tuple[int, Estimate]]) -> Estimate:
    total = max(sum(n for n, _ in shares), 1)
    low, high, estimate = (
        math.fsum(n * getattr(share, end) for n, share in shares) / total for end in ("low", "high", "estimate")
    )
    return Estimate.of(low, high, estimate)
