"""Parsers for values of flags, environment variables and settings; they raise ValueError with a reason."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from precdoctor.errors import UsageError, did_you_mean

Parser = Callable[[Any], Any]

#: The formats of reports. `precdoctor.reporting.outputs` writes them, but is too slow to import for ``--help``.
OUTPUT_FORMATS = ("full", "concise", "json", "markdown", "junit", "github", "gitlab", "sarif")

_UNITS = {
    "": 1, "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def read(parser: Parser, raw: Any, origin: str) -> Any:
    """Parse ``raw``, the value of the setting or flag ``origin``; None stays None.

    Raises:
        UsageError: the value is invalid; the message begins with ``origin``.
    """
    try:
        return None if raw is None else parser(raw)
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from None


def parse_size(raw: Any) -> int:
    """A size in bytes above 0: ``256MiB``, ``1.5 GB`` or a plain number of bytes."""
    match = _SIZE.fullmatch(str(raw))
    unit = match and next((u for u in _UNITS if u.lower() == match[2].lower()), None)
    if isinstance(raw, bool) or match is None or unit is None:
        raise ValueError(f"{raw!r} is not a size; write a number and a unit, such as 256MiB or 2GB")
    count = int(float(match[1]) * _UNITS[unit])
    if count <= 0:
        raise ValueError(f"{raw!r} is not a size above zero, such as 256MiB")
    return count


def parse_steps(raw: Any) -> tuple[int | None, int | None]:
    """A half-open range ``A:B`` of steps; None for an end that is left out."""
    match = re.fullmatch(r"\s*(\d*)\s*:\s*(\d*)\s*", str(raw))
    if match is None:
        raise ValueError(f"{raw!r} is not a step range; write A:B, A included and B not, such as 100:200 or 500:")
    first, last = (int(end) if end else None for end in match.groups())
    if last is not None and last <= (first or 0):
        raise ValueError(f"{raw!r} holds no step; in a range A:B, A is below B, such as 100:200")
    return first, last


def parse_count(raw: Any) -> int:
    """A whole number from 0."""
    if isinstance(raw, bool) or not re.fullmatch(r"\s*\d+\s*", str(raw)):
        raise ValueError(f"{raw!r} is not a whole number from 0, such as 8")
    return int(raw)


def parse_period(raw: Any) -> int:
    """A whole number from 1."""
    count = parse_count(raw)
    if count < 1:
        raise ValueError(f"{raw!r} is not a number of steps from 1, such as 50")
    return count


def parse_step_list(raw: Any) -> tuple[int, ...]:
    """Step numbers, separated by commas or in a list; ascending, without duplicates."""
    return _numbers(raw, "names no steps; write their numbers with commas, such as 0,100,1000")


def _numbers(raw: Any, why: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas or in a list; ascending, without duplicates. ``why`` they are none."""
    parts = raw if isinstance(raw, list) else str(raw).split(",")
    if not parts or isinstance(raw, bool) or not all(re.fullmatch(r"\s*\d+\s*", str(part)) for part in parts):
        raise ValueError(f"{raw!r} {why}")
    return tuple(sorted({int(part) for part in parts}))


def parse_scans(raw: Any) -> int:
    """A number of steps from 1; ``off`` is 0."""
    if raw is False or str(raw).strip().lower() == "off":
        return 0
    try:
        count = parse_count(raw)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"{raw!r} is neither a number of steps from 1, such as 4, nor off")
    return count


def parse_every(raw: Any) -> int:
    """A power of two, at least 1."""
    count = parse_count(raw)
    if count < 1 or count & (count - 1):
        raise ValueError(f"{raw!r} is not a power of two; take one of 1, 2, 4, 8, 16 ...")
    return count


def parse_percentage(raw: Any) -> float:
    """``1%`` or ``0.5 %`` as a fraction, above 0 and at most 1."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%?)\s*", str(raw))
    fraction = float(match[1]) / 100 if match else 0.0
    if match and not match[2]:
        raise ValueError(f"{raw!r} has no percent sign; write one such as 1% or 0.5%")
    if not 0 < fraction <= 1:
        raise ValueError(f"{raw!r} is not a percentage above 0; write one such as 1% or 0.5%")
    return fraction


def parse_share(raw: str) -> float:
    """A share between 0 and 1: ``0.5%`` or ``0.005``."""
    try:
        share = float(raw.removesuffix("%")) / (100.0 if raw.endswith("%") else 1.0)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{raw!r} is not a share between 0 and 1, such as 0.005 or 0.5%")
    return share


def parse_scale(raw: str) -> float:
    """A scale: ``64``, ``0.5``, ``2^13``, ``2**13``. Who uses it refuses values that are not finite and positive."""
    power = re.fullmatch(r"\s*2(?:\^|\*\*)\s*([+-]?\d+)\s*", raw)
    try:
        return 2.0 ** int(power[1]) if power else float(raw)
    except (ValueError, OverflowError):
        raise ValueError(f"{raw!r} is not a number in float64's range, such as 1024 or 2^10") from None


def parse_decibels(raw: str) -> float:
    """A number of decibels, above -1000 and below 1000."""
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not -1000.0 < value < 1000.0:
        raise ValueError(f"{raw!r} is not a number of decibels, such as 20")
    return value


def parse_ranks(raw: Any) -> tuple[int, ...] | None:
    """Ranks: ``all`` (gives None), one number, or several separated by commas or in a list."""
    return None if raw == "all" else _numbers(raw, "names no ranks; write all, 0, or several such as 0,8,16")


def parse_switch(raw: Any) -> bool:
    """True or false: ``true``, ``1``, ``yes``, ``on``, or ``false``, ``0``, ``no``, ``off``."""
    known = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    try:
        return known[str(raw).strip().lower()]
    except KeyError:
        raise ValueError(f"{raw!r} is neither true nor false") from None


def parse_list(raw: Any) -> tuple[str, ...]:
    """A list of strings, or one string separated by commas; empty strings are dropped."""
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        raise ValueError(f'{raw!r} is not a list of strings, such as ["blocks.*", "head"]')
    return tuple(p.strip() for p in parts if p.strip())


def parse_path(raw: Any) -> Path:
    """A path; ``~`` is the home directory."""
    if not isinstance(raw, (str, Path)) or not str(raw):
        raise ValueError(f"{raw!r} is not a path")
    return Path(raw).expanduser()


def parse_text(raw: Any) -> str:
    """Text that is not blank."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError(f"{raw!r} is not a command")
    return raw


def parse_paths(raw: Any) -> tuple[Path, ...]:
    """One path or a list of them."""
    return tuple(parse_path(entry) for entry in (raw if isinstance(raw, (list, tuple)) else [raw]))


def choice(*options: str) -> Parser:
    """A parser that accepts exactly ``options``."""

    def parse(raw: Any) -> str:
        if raw in options:
            return str(raw)
        raise ValueError(f"{raw!r} is not one of {', '.join(options)}{did_you_mean(str(raw), options)}")

    return parse
