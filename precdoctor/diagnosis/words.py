"""Counts and shares in the words of a report: one element is, three elements are."""

from __future__ import annotations


def plural(count: int, noun: str) -> str:
    """``1 step``, ``12 steps``, ``2 losses``, ``3 matrices``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("matrix"):
        return f"{count:,} {noun[:-1]}ces"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def there_are(count: int, noun: str) -> str:
    """``1 element is``, ``12 elements are``."""
    return f"{plural(count, noun)} {'is' if count == 1 else 'are'}"


def memory(count: float) -> str:
    """``512 B``, ``36 KiB``, ``1.5 GiB``: a number of bytes in the unit that fits, three significant digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def percent(fraction: float) -> str:
    """``41 %``, ``0.3 %``, ``0.002 %``: two significant digits below ten."""
    value = 100.0 * fraction
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"
