"""Draws the exponent histogram of a tensor on the range of its number format, in one line of characters.

::

    2^-24 ┊····▁▁▂▃▄┊▅▆▇██▇▆▅▄▃▂▁············┊ 65504
          subnormal  normal numbers of float16
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from precdoctor.diagnosis.claims.words import percent
from precdoctor.errors import UsageError
from precdoctor.numerics import ExponentHistogram, Format, format_of_dtype
from precdoctor.numerics.histogram import bin_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"


@dataclass(frozen=True)
class RangeBar:
    """The cells of a bar.

    Attributes:
        format: the format whose range the bar spans.
        heights: 0 (empty) to 8 per cell, from the smallest subnormal to the largest number; logarithmic in the count.
        subnormal_cells: number of cells of subnormal numbers, at the left.
        below: share of the non-zero elements below the range; not 0 only if ``format`` is not the tensor's own.
        above: share of the non-zero elements above the range, likewise.
    """

    format: Format
    heights: tuple[int, ...]
    subnormal_cells: int
    below: float
    above: float

    @classmethod
    def of(cls, evidence: Mapping[str, Any], width: int) -> RangeBar | None:
        """Make a bar from the ``range`` entry of a finding's evidence.

        Args:
            evidence: ``dtype, exp_lo, exp_hist`` and optionally ``format``, the dtype whose range to use instead.
            width: most cells; in wide formats a cell holds several binades.

        Returns:
            None for an unknown dtype or an empty histogram.
        """
        try:
            fmt = format_of_dtype(str(evidence.get("format") or evidence.get("dtype")))
        except UsageError:
            return None
        histogram = ExponentHistogram.of(evidence.get("exp_lo"), evidence.get("exp_hist")).trimmed()
        if histogram.total <= 0:
            return None
        first, last = bin_of(fmt.min_subnormal), bin_of(fmt.max)
        per_cell = max(1, math.ceil((last - first + 1) / max(width, 8)))
        cells = [0] * math.ceil((last - first + 1) / per_cell)
        below = above = 0
        for offset, count in enumerate(histogram.counts.tolist()):
            k = histogram.lo + offset
            if k < first:
                below += count
            elif k > last:
                above += count
            else:
                cells[(k - first) // per_cell] += count
        top = math.log2(1 + max(cells))
        heights = tuple(0 if c <= 0 else max(1, round(8 * math.log2(1 + c) / top)) for c in cells)
        subnormal = math.ceil((bin_of(fmt.min_normal) - first) / per_cell)
        return cls(fmt, heights, subnormal, below / histogram.total, above / histogram.total)

    def text(self, *, ascii_only: bool = False, ends: bool = True) -> Text:
        """The bar as text: ends, cells, and the shares outside the range; without ``ends`` only the cells."""
        levels, edge, empty = (_ASCII, "|", " ") if ascii_only else (_BLOCKS, "┊", "·")
        out = Text(no_wrap=True, overflow="ignore")
        if self.below and ends:
            out.append(f"{percent(self.below)} below  ", "pd.bad")
        if ends:
            out.append(f"{_power(self.format.min_subnormal)} {edge}", "pd.quiet")
        cells = []
        for i, height in enumerate(self.heights):
            if i == self.subnormal_cells and 0 < i < len(self.heights):
                cells.append((edge, "pd.quiet"))
            style = "pd.near" if i < self.subnormal_cells else "pd.bad" if i == len(self.heights) - 1 else "pd.code"
            cells.append((levels[height - 1], style) if height else (empty, "pd.quiet"))
        for style, run in itertools.groupby(cells, key=lambda cell: cell[1]):
            out.append("".join(character for character, _ in run), style)
        if ends:
            out.append(f"{edge} {_value(self.format.max)}", "pd.quiet")
        if self.above and ends:
            out.append(f"  {percent(self.above)} above", "pd.bad")
        return out


def range_words(fmt: Format, *, ascii_only: bool = False) -> str:
    """The range that a bar spans, for a header: ``2^-9 … 448``."""
    return f"{_power(fmt.min_subnormal)} {'..' if ascii_only else '…'} {_value(fmt.max)}"


def _power(value: float) -> str:
    return f"2^{math.frexp(value)[1] - 1}"


def _value(value: float) -> str:
    return f"{value:.0f}" if value < 1e5 else f"{value:.2g}"
