"""Formatting of counts, shares, names and memory sizes in messages and reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 step``, ``2,000 steps``, ``2 losses``, ``3 batches``, ``3 matrices``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("matrix"):
        return f"{count:,} {noun[:-1]}ces"
    return f"{count:,} {noun}{'es' if noun.endswith(('ch', 'sh', 's', 'x')) else 's'}"


def there_are(count: int, noun: str) -> str:
    """Return ``1 element is`` or ``12 elements are``."""
    return f"{plural(count, noun)} {'is' if count == 1 else 'are'}"


def non_finite(nan: int, pos_inf: int, neg_inf: int) -> str:
    """Return ``12 NaN and 3 +Inf``; empty if all counts are 0."""
    counts = {"NaN": nan, "+Inf": pos_inf, "-Inf": neg_inf}
    return " and ".join(f"{count:,} {word}" for word, count in counts.items() if count)


def named(names: Sequence[str]) -> str:
    """Return `` `a`, `b`, `c`, `d` and 7 more``: the first four names in backticks, and how many are left."""
    return ", ".join(f"`{n}`" for n in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def and_more(count: int, noun: str = "") -> str:
    """Return `` (and 3 more)``, or `` (and 1 more weight)``, to follow the name of one of ``count``; empty for one."""
    more = plural(count - 1, f"more {noun}") if noun else f"{count - 1:,} more"
    return f" (and {more})" if count > 1 else ""


def memory(count: float) -> str:
    """Return a number of bytes in the unit that fits, with three significant digits: ``512 B``, ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 999.5:  # else three digits round to 1e+03
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def percent(fraction: float | None) -> str:
    """Return a fraction in percent: ``41 %``, ``0.3 %``, ``99.6 %``; an en dash if it is None or NaN.

    Two significant digits below 10 %. Only an exact 0 is printed as ``0 %`` and only an exact 1 as ``100 %``.
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


def several_models(places: Iterable[tuple[str, str]]) -> bool:
    """Return whether modules of several models occur among ``(root, module)``, so that labels must name the root."""
    return len({root for root, module in places if module}) > 1


def module_label(root: str, module: str, *, several: bool) -> str:
    """The module's FQN, after its root if there are ``several`` models: both halves of a GAN have a ``main.0``."""
    return f"{root} {module}" if several and module else module or root
