"""Counts and shares in the words of every report: one element is, three elements are, and 0.9996 is not all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence


def plural(count: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``, ``2 losses``, ``3 batches``, ``3 matrices``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("matrix"):
        return f"{count:,} {noun[:-1]}ces"
    return f"{count:,} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"


def there_are(count: int, noun: str) -> str:
    """``1 element is``, ``12 elements are``."""
    return f"{plural(count, noun)} {'is' if count == 1 else 'are'}"


def non_finite(nan: int, pos_inf: int, neg_inf: int) -> str:
    """``12 NaN and 3 +Inf``; empty without any."""
    counts = {"NaN": nan, "+Inf": pos_inf, "-Inf": neg_inf}
    return " and ".join(f"{count:,} {word}" for word, count in counts.items() if count)


def named(names: Sequence[str]) -> str:
    """`` `a`, `b` and 7 more``: the first four in backticks, and how many are left."""
    return ", ".join(f"`{n}`" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def memory(count: float) -> str:
    """``512 B``, ``36 KiB``, ``1.5 GiB``: a number of bytes in the unit that fits, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def percent(fraction: float | None) -> str:
    """A fraction for people: ``41 %``, ``0.3 %``, ``99.6 %``; two significant digits below ten, unknown as an en dash.

    Rounding never reaches an end: only a true zero is ``0 %`` and only the whole is ``100 %``.
    """
    if fraction is None or math.isnan(fraction):
        return "–"
    value = 100.0 * fraction
    if 0.0 < abs(value) < 0.01:
        return "<0.01 %" if value > 0.0 else ">-0.01 %"
    if 99.0 < value < 100.0:
        return f"{value:.1f} %" if value < 99.9 else ">99.9 %"
    if abs(value) < 9.95:
        return f"{value:.2g} %"
    return f"{value:,.0f} %"
