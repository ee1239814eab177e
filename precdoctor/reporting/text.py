"""Makes recorded text safe for a terminal (names and source lines of a log may be hostile), and formats numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from precdoctor.diagnosis.claims.words import percent

#: Characters that a terminal might obey or hide: C0 and C1 controls (ESC, CR, LF ...), bidirectional and zero-width
#: marks, line and paragraph separators, lone surrogates (undecodable bytes of an argv).
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_UNSAFE_IN_BLOCK = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x09\x0b-\x1f"))
#: The share of the cost of other steps that samples may take in short steps, as the recorder's sampler has it.
SAMPLES_BESIDE = 0.5
#: From this overhead on (share of the run's time) the cost is explained.
_MUCH = 0.05
#: Nanoseconds that an unsampled step may cost. Chosen empirically: small models on a CPU pay 0.7 to 1.8 ms.
_BETWEEN_SAMPLES = 1e6
#: From this share of the time on, waiting for the device is reported; less would round to 0 %.
_TELLING_WAIT = 0.005
#: CI runners obey ``##[error]`` and ``##vso[...]`` anywhere in a line; the console takes care of ``::error``.
_CI = re.compile(r"##(?=\[|vso\[)")
#: Most characters of a name or message; anything longer is an accident or an attack.
LIMIT = 1000


def clean(value: object, limit: int = LIMIT) -> str:
    r"""``value`` as one line of harmless text: control characters become visible escapes such as ``\x1b``.

    Markup needs no escaping here: every console of precdoctor has markup, emoji and highlighting turned off.
    """
    return _shorten(_CI.sub("## ", _UNSAFE.sub(_escape, str(value))), limit)


def clean_block(value: object) -> str:
    """As :func:`clean`, for text of several lines: line feeds stay, tabs become four spaces."""
    return _shorten(_CI.sub("## ", _UNSAFE_IN_BLOCK.sub(_escape, str(value).replace("\t", "    "))), 20 * LIMIT)


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    named = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return named or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def number(value: object) -> str:
    """A measured value for a table: four significant digits, integers in full, None as an en dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return str(int(value)) if abs(value) < 1e5 and value == int(value) else f"{value:.4g}"
    return clean(value)


def power(scale: float) -> str:
    """A loss scale: ``2^16`` for a power of two other than 1, else as :func:`number`."""
    if not math.isfinite(scale):
        return number(scale)
    exponent = round(math.log2(scale)) if scale > 0.0 else 0
    return f"2^{exponent}" if exponent and scale == 2.0**exponent else number(scale)


#: The series of a run's steps: title, whether they are drawn logarithmically, and how their values are spelt.
SERIES: Mapping[str, tuple[str, bool, Callable[[float], str]]] = {
    "loss": ("loss", False, number),
    "grad_norm": ("gradient norm", True, number),
    "loss_scale": ("loss scale", True, power),
    "lr": ("learning rate", False, number),
}


def factor(binades: float | None) -> str:
    """A distance in binades as a factor: ``2^12.3``; None as an en dash."""
    return "–" if binades is None else f"2^{number(round(binades, 1) + 0.0)}"


def recording_cost(recorder: Mapping[str, Any]) -> str | None:
    """Sentences on the cost of recording; if high, also its reason and the cost of longer runs. None: not measured."""
    overhead, cost = recorder.get("overhead_fraction"), recorder.get("cost")
    if not isinstance(overhead, (int, float)):
        return None
    sentence = f"Recording took {percent(float(overhead))} of the run's time"
    if overhead > 1.0:
        sentence = f"Recording took {overhead:.1f} times the run's time, as it also works in a thread of its own"
    if isinstance(waited := recorder.get("waited_fraction"), float) and waited >= _TELLING_WAIT:
        sentence += (
            f" (beside {percent(waited)} in which its hooks waited for the device, which worked for the training)"
        )
    if overhead < _MUCH:
        return f"{sentence}."
    between = recorder.get("between")
    longer = _longer_runs(between if isinstance(between, Mapping) else {}, cost if isinstance(cost, Mapping) else {})
    full = cost.get("full_steps") if isinstance(cost, Mapping) else None
    if not isinstance(cost, Mapping) or not isinstance(full, int) or full < 1:
        return f"{sentence}. {longer}".rstrip()
    scanned, settled = cost.get("scanned_steps"), cost.get("settled_fraction")
    scans = f" ({number(scanned)} of them op by op)" if scanned and full > 1 else ""
    sentence += f": {f'the first {full:,} steps are' if full > 1 else 'the first step is'} recorded in full{scans}."
    if settled is not None:
        return f"{sentence} Since then it took {percent(settled)}, {_milliseconds(cost['settled_ns'])} a step."
    return f"{sentence} {longer}".rstrip()


def _longer_runs(between: Mapping[str, Any], cost: Mapping[str, Any]) -> str:
    """A sentence on the cost of longer runs, from the unsampled steps or the length of a step; "" if unknown."""
    if between:
        fraction, length = between["fraction"], _milliseconds(between["step_ns"])
        return (
            f"Steps of {length} cost {percent(fraction)} between samples; longer runs settle below "
            f"{percent((1.0 + SAMPLES_BESIDE) * fraction)}."
        )
    budget, step = cost.get("budget"), cost.get("step_ns")
    if budget is None:
        return ""
    if step is not None and budget * step < _BETWEEN_SAMPLES:
        return "Longer runs are sampled and cost less."
    return f"Longer runs are sampled to stay near `--budget`, {percent(budget)}."


def _milliseconds(nanoseconds: float) -> str:
    """Milliseconds, ``0.34 ms`` or ``220 ms``: two significant digits, never in scientific notation."""
    value = nanoseconds / 1e6
    return f"{value:.2g} ms" if value < 99.5 else f"{value:,.0f} ms"


def not_neutral(recorder: Mapping[str, Any]) -> str | None:
    """A clause on the options of ``record`` that may have changed the training; None if there are none."""
    changed_by = recorder.get("changed_by")
    return f"recorded with {', '.join(changed_by)}, which may change the training" if changed_by else None


def tensor_label(module: str, kind: str, name: str) -> str:
    """``blocks.0.attn weight_grad bias``; a name equal to the kind is left out."""
    return " ".join(word for word in (module, kind, "" if name == kind else name) if word)


def lost_rows(recorder: Mapping[str, Any]) -> str:
    """The rows that the recorder dropped, by reason: ``12 queue full, 3 disk full``; empty if there are none."""
    dropped = {reason: rows for reason, rows in dict(recorder.get("dropped") or {}).items() if rows}
    return ", ".join(f"{number(rows)} {clean(reason).replace('_', ' ')}" for reason, rows in dropped.items())


def spans(steps: Iterable[int], most: int = 4) -> str:
    """Step numbers as ranges: ``0–12, 14, 20–31``; if there are more than ``most``, first and last step: ``0 … 99``."""
    ranges: list[list[int]] = []
    for step in sorted(set(steps)):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    if not ranges:
        return "none"
    if len(ranges) > most:
        return f"{ranges[0][0]} … {ranges[-1][1]}"
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in ranges)
