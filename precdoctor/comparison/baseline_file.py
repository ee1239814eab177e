"""Writes and reads a baseline as a TOML file with a sorted line per tensor, which a person can review as a diff."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precdoctor.comparison.baseline import Baseline, Expected, Learned, spread_of_zero
from precdoctor.comparison.summary import METRICS, SHARES, Start, shares_of
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.errors import CorruptRunError, NewerSchemaError, UsageError
from precdoctor.runlog.toml import read_toml, toml_key, toml_value

#: Incremented whenever the meaning of a key changes.
SCHEMA_VERSION = 1
#: A larger file is no baseline; 10 MB hold some 50 000 tensors.
_MAX_BYTES = 64 << 20
_MOST_STEPS = 10_000_000
_ROOT, _NAMELESS = ".", "-"
_SIGNS = (_ROOT, _NAMELESS)
_NAMES = tuple(metric.name for metric in METRICS)
_HEAD = """\
# What healthy repeats of a training look like, for `precdoctor gate RUN --baseline THIS_FILE`.
# Written by `precdoctor gate --write-baseline`; written anew after a change that was meant, and reviewed like code.
# Each figure is [median over the repeats, run-to-run spread (one robust standard deviation)]; shares that were zero in
# every repeat are left out.
"""


def text_of(baseline: Baseline) -> str:
    """The content of the file; deterministic, so that equal baselines give no diff."""
    return "\n".join(_lines(baseline)) + "\n"


def _lines(baseline: Baseline) -> Iterator[str]:
    yield _HEAD.rstrip()
    for metric in METRICS:
        yield f"#   {metric.name:<10} {metric.doc} ({metric.unit})"
    yield f"\nschema_version = {SCHEMA_VERSION}"
    yield f"repeats = {baseline.repeats}"
    yield f"steps = {toml_value(_ranges(baseline.steps))}  # half-open"
    yield f"sampled = {toml_value(_ranges(baseline.sampled))}"
    if baseline.loss is not None:
        yield f"loss = {_pair(baseline.loss)}  # nats, the median of the last quarter of the steps"
    yield f"skipped = {_pair(baseline.skipped)}  # share of steps that a loss scaler skipped"
    if baseline.bad_losses:
        yield f"bad_losses = {toml_value(_ranges(sorted(baseline.bad_losses)))}  # steps with a non-finite loss"
    yield "\n[provenance]"
    for name, value in baseline.provenance.items():
        if value not in (None, "", [], {}):
            yield f"{toml_key(name)} = {toml_value(value)}"
    for root in sorted({key[0] for key in baseline.tensors}):
        yield f"\n[tensors.{toml_key(root)}]"
        for key in sorted(k for k in baseline.tensors if k[0] == root):
            yield f"{toml_key(_tensor_name(key))} = {_tensor(baseline.tensors[key], baseline.repeats)}"
    yield from _starts(baseline)


def _starts(baseline: Baseline) -> Iterator[str]:
    """The lines on the first step of each distinct start, for the comparison with runs from the same seed."""
    count = max((len(e.starts) for e in baseline.tensors.values()), default=0)
    if not count:
        return
    yield "\n# The first step tensor by tensor: RMS, mean, amax. Runs from the same weights and data must agree with it"
    yield "# up to rounding."
    for at in range(count):
        for root in sorted({key[0] for key in baseline.tensors}):
            yield f"[start.{at}.{toml_key(root)}]"
            for key in sorted(k for k in baseline.tensors if k[0] == root):
                if (start := baseline.tensors[key].starts[at]) is not None:
                    figures = ", ".join(f"{v:.12g}" for v in (start.rms, start.mean, start.amax))
                    yield f"{toml_key(_tensor_name(key))} = [{figures}]"


def _silent(name: str, expected: Expected, repeats: int) -> bool:
    """Return whether a metric is a share that was zero in every repeat. It is left out, and restored on reading."""
    learned = expected.metrics[name]
    if name not in SHARES:
        return False
    return learned.center == 0.0 and learned.spread <= spread_of_zero(name, expected.shape, repeats) * (1.0 + 1e-9)


def _tensor(expected: Expected, repeats: int) -> str:
    entries = [f"dtype = {toml_value(expected.dtype)}"]
    entries += [f"class = {toml_value(expected.module_class)}"] if expected.module_class else []
    entries += [f"shape = {toml_value(list(expected.shape))}"]
    entries += [f"order = {expected.order}"] if expected.order is not None else []
    entries += [f"nonfinite = {toml_value(sorted(expected.badness))}"] if expected.badness else []
    written = [name for name in _NAMES if name in expected.metrics and not _silent(name, expected, repeats)]
    entries += [f"{name} = {_pair(expected.metrics[name])}" for name in written]
    return f"{{ {', '.join(entries)} }}"


def _pair(learned: Learned) -> str:
    """``[centre, spread]``, the centre rounded to about a hundredth of the spread."""
    return f"[{_rounded(learned.center, learned.spread)}, {learned.spread:.2g}]"


def _rounded(value: float, spread: float) -> str:
    digits = 6 if spread <= 0.0 else min(12, max(0, 2 - math.floor(math.log10(spread))))
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in ("-0", "") else text


def _ranges(steps: Sequence[int]) -> list[list[int]]:
    """Ascending steps as ``[first, end, stride]``, the end not included: ``[[0, 50, 1]]``."""
    ranges: list[list[int]] = []
    at = 0
    while at < len(steps):
        stride = steps[at + 1] - steps[at] if at + 1 < len(steps) else 1
        last = at
        while last + 1 < len(steps) and steps[last + 1] - steps[last] == stride:
            last += 1
        ranges.append([steps[at], steps[last] + 1, stride])
        at = last + 1
    return ranges


def _tensor_name(key: Key) -> str:
    """Module, kind, name and call: ``blocks.0.attn output``; a JSON list if one has a blank or is ``.`` or ``-``."""
    _, module, kind, name, call = key
    if any(re.search(r"\s", word) or word in _SIGNS for word in (module, kind, name)) or module.startswith("["):
        return json.dumps([module, kind, name, call])
    words = [module or _ROOT, kind]
    if name or call:
        words.append(name or _NAMELESS)
    return " ".join([*words, str(call)] if call else words)


def _parsed_name(root: str, text: str) -> Key:
    if text.startswith("["):
        module, kind, name, call = json.loads(text)
        return (root, str(module), str(kind), str(name), int(call))
    module, kind, *rest = text.split(" ")
    name, call = (*rest, *(_NAMELESS, "0")[len(rest) :])
    return (root, "" if module == _ROOT else module, kind, "" if name == _NAMELESS else name, int(call))


def read_baseline(file: Path) -> Baseline:
    """Read a baseline from its file.

    Raises:
        UsageError: the file cannot be read, or is no baseline.
        NewerSchemaError: a newer precdoctor wrote it.
        CorruptRunError: a value is missing or invalid.
    """
    table = _loaded(file)
    version = table.get("schema_version")
    if not isinstance(version, int) or "tensors" not in table:
        raise UsageError(f"{file} is no baseline; write one with `precdoctor gate --write-baseline {file} RUN...`")
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(f"{file} was written by a newer precdoctor (baseline schema {version})")
    try:
        return _baseline(file, table)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise CorruptRunError(f"{file} is a damaged baseline: {error!r}; write it anew, or take it from git") from error


def _loaded(file: Path) -> dict[str, Any]:
    try:
        return read_toml(file, _MAX_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such baseline") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as a baseline: {error}") from None


def _baseline(file: Path, table: Mapping[str, Any]) -> Baseline:
    starts = table.get("start", {})
    count, repeats = len(starts), _positive(table["repeats"])
    tensors = {}
    for root, entries in table["tensors"].items():
        for text, entry in entries.items():
            own = [starts[str(at)].get(root, {}).get(text) for at in range(count)]
            key = _parsed_name(root, text)
            tensors[key] = _expected(entry, key[2], repeats, own)
    return Baseline(
        source=str(file),
        repeats=repeats,
        steps=tuple(_expanded(table["steps"])),
        sampled=tuple(_expanded(table["sampled"])),
        tensors=tensors,
        loss=_learned(table["loss"]) if "loss" in table else None,
        skipped=_learned(table["skipped"]),
        bad_losses=frozenset(_expanded(table.get("bad_losses", ()))),
        provenance=table.get("provenance", {}),
    )


def _expected(entry: Mapping[str, Any], kind: str, repeats: int, starts: Sequence[Any]) -> Expected:
    return Expected(
        dtype=str(entry["dtype"]),
        shape=tuple(int(n) for n in entry["shape"]),
        module_class=str(entry.get("class", "")),
        order=int(entry["order"]) if "order" in entry else None,
        badness=frozenset(str(b) for b in entry.get("nonfinite", ())),
        metrics=_metrics(entry, kind, repeats),
        starts=tuple(None if s is None else Start(*(_number(v) for v in s)) for s in starts),
    )


def _metrics(entry: Mapping[str, Any], kind: str, repeats: int) -> dict[str, Learned]:
    metrics = {name: _learned(entry[name]) for name in _NAMES if name in entry}
    shape = [int(n) for n in entry["shape"]]
    for name in shares_of(kind):
        if name not in metrics:
            metrics[name] = Learned(0.0, spread_of_zero(name, shape, repeats))
    return metrics


def _learned(pair: Sequence[Any]) -> Learned:
    center, spread = (_number(v) for v in pair)
    if spread < 0.0:
        raise ValueError(f"a spread below zero: {spread}")
    return Learned(center, spread)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError(f"not a finite number: {value!r}")
    return number


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"not a number of runs: {value!r}")
    return value


def _expanded(ranges: Sequence[Sequence[int]]) -> Iterator[int]:
    """The steps of :func:`_ranges`; ValueError if a range has more than a long training, or begins below 0."""
    for first, end, stride in ranges:
        span = range(first, end, stride)
        if len(span) > _MOST_STEPS or first < 0:
            raise ValueError(f"no such steps: {first} to {end}")
        yield from span
