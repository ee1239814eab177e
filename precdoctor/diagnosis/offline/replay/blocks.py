"""Replays a recorded run with a block format.

Every block has its own scale, computed from its own amax, so no scale can be outdated: the relative histograms of all
steps are added, and one prediction per tensor covers all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from precdoctor.diagnosis.offline.replay.amax_log import KEY, Key, selected
from precdoctor.diagnosis.offline.replay.fp8 import KINDS, RecipeReplay, TensorReplay
from precdoctor.diagnosis.survey.frames import firsts, groups, histograms, keys, largest, magnitudes
from precdoctor.diagnosis.survey.measures import lists
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import CorruptRunError, NothingRecordedError, UsageError
from precdoctor.numerics.block_prediction import predict_blocks
from precdoctor.numerics.blocks import BlockFormat, BlockHistogram
from precdoctor.numerics.cells import Estimate


def replay_blocks(
    view: RunView,
    fmt: BlockFormat,
    *,
    kinds: Sequence[str] = KINDS,
    wanted: Callable[[str], bool] | None = None,
    steps: tuple[int | None, int | None] = (None, None),
) -> RecipeReplay:
    """Replay a log with a block format; arguments as for :func:`.fp8.replay_recipes`.

    A tensor scale (NVFP4) is taken from the largest amax of all steps, so underflow of block scales is overestimated.

    Raises:
        UsageError: blocks of this size are never recorded.
        NothingRecordedError: they were not recorded in this run.
        CorruptRunError: a histogram contradicts itself.
    """
    height, size = fmt.block
    if height != 1:
        raise UsageError(
            f"{fmt.name} has blocks of {height}x{size}, which are not recorded; "
            "recorded are 1x16, 1x32 and 1x128: mxfp8, nvfp4, tile128"
        )
    tensors = [_tensor(*total, fmt) for total in _sums(view, size, kinds, wanted, steps)]
    if not tensors:
        raise NothingRecordedError(
            f"{view.run.origin} holds no block{size}_hist of kind {', '.join(kinds)} that was asked for; "
            f"{fmt.name} cannot be replayed"
        )
    tensors.sort(key=lambda t: (-t[1].saturated.estimate, -t[1].flushed.estimate, t[1].module, t[1].kind, t[1].name))
    return RecipeReplay(
        recipe=fmt.name,
        tensors=tuple(t for _, t in tensors),
        flushed=Estimate.mean([t.flushed for _, t in tensors], [n for n, _ in tensors]),
        saturated=Estimate.mean([t.saturated for _, t in tensors], [n for n, _ in tensors]),
        stale_tensors=0,
        history=False,
    )


def _sums(
    view: RunView,
    size: int,
    kinds: Sequence[str],
    wanted: Callable[[str], bool] | None,
    steps: tuple[int | None, int | None],
) -> Iterator[tuple[Key, BlockHistogram, float, int]]:
    """Yield each tensor, the sum of its block histograms over the range ``steps``, its largest amax, its steps."""
    below, peaks = f"block{size}_hist", f"block{size}_amax"
    first, stop = steps
    where = [("step", ">=", first or 0), *([("step", "<", stop)] if stop is not None else [])]
    frame = view.measured((), kinds, columns=("amax", below, f"{peaks}_lo", f"{peaks}_hist"), where=where)
    frame = frame[frame[below].notna()]
    tensors = groups(frame, KEY)
    lengths, counts = lists(frame, below)
    if (lengths > BlockHistogram.LIMIT).any() or (counts < 0).any():
        raise CorruptRunError(f"the log is damaged: {below} has over {BlockHistogram.LIMIT} entries, or one below zero")
    found = [key[:4] for key in keys(frame.iloc[firsts(tensors)])]
    places = np.arange(counts.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    table = np.zeros((len(found), BlockHistogram.LIMIT), dtype=np.int64)
    np.add.at(table, (np.repeat(tensors, lengths), places), counts.astype(np.int64))
    amax = histograms(frame, peaks).merged(tensors, len(found))
    largest_ = np.nan_to_num(largest(tensors, magnitudes(frame)))
    seen = np.bincount(tensors[firsts(groups(frame, (*KEY, "step")))], minlength=len(found))
    for i in np.flatnonzero(selected(view, found, wanted)).tolist():
        whole = BlockHistogram(size, tuple(table[i].tolist()), amax.row(i))
        yield found[i], whole, float(largest_[i]), int(seen[i])


def _tensor(key: Key, histogram: BlockHistogram, amax: float, steps: int, fmt: BlockFormat) -> tuple[int, TensorReplay]:
    """Return the number of elements and the replay of one tensor."""
    prediction = predict_blocks(histogram, fmt, amax=amax or None)
    return prediction.elements, TensorReplay(
        *key,
        format=fmt.element.name,
        steps=steps,
        flushed=prediction.flushed,
        saturated=prediction.saturated,
        padding_binades=prediction.headroom_binades.estimate,
    )
