"""Learns a baseline from healthy repeats of a training: for each tensor and metric a centre and a run-to-run spread."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from precdoctor.comparison.spread import moderated, robust_spread
from precdoctor.comparison.steps import (
    bad_losses,
    loss_window,
    sampled_by_all,
    skipped_share,
    step_mismatch,
    typical_loss,
    usable_steps,
)
from precdoctor.comparison.summary import METRICS, Start, Summary, metrics_of, summaries, unit_roundoff
from precdoctor.diagnosis.engine import view_of
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import IncomparableRunsError
from precdoctor.runlog.reader import Run

#: Most repeats whose first step is kept tensor by tensor, for the comparison with runs from the same seed.
MAX_STARTS = 3
#: Assumed spread if there is only one healthy run, added to that of rounding; by unit of the metric. The metric "zeros"
#: has its own, because other data alone change it more, as in the gradient of an embedding.
_UNMEASURED = {"fraction": 0.0025, "binades": 0.25, "zeros": 0.05}
#: Assumed spreads of the run's figures if there is only one healthy run: a share of the loss, and a share of steps.
_UNMEASURED_LOSS, _UNMEASURED_SKIPPED = 0.0125, 0.025
#: Fewest tensors of a kind from which the typical spread of that kind is taken.
_FEWEST_TENSORS = 8
_UNITS = {metric.name: metric.unit for metric in METRICS}
HIDDEN = "<hidden>"
#: Parts of an option's name that mark its value as a secret.
_SECRET = frozenset(["auth", "credential", "credentials", "key", "passwd", "password", "pat", "secret", "token"])
_NAME = re.compile(r"-{0,2}([A-Za-z][\w.-]*)")


@dataclass(frozen=True)
class Learned:
    """One figure over the healthy repeats: median, and spread as one robust standard deviation."""

    center: float
    spread: float


@dataclass(frozen=True)
class Expected:
    """The expected values of one tensor, from the healthy repeats.

    Attributes:
        order: place in the execution order of a step; None if the log does not have it.
        badness: the kinds of non-finite values that occur in healthy repeats, such as -inf of an attention mask.
        metrics: by the names of :data:`~precdoctor.comparison.summary.METRICS`.
        starts: the tensor on the first step, for each distinct start; None if it had no finite element there.
    """

    dtype: str
    shape: tuple[int, ...]
    module_class: str
    order: int | None
    badness: frozenset[str]
    metrics: Mapping[str, Learned]
    starts: tuple[Start | None, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """The expected values of a training, learned from healthy repeats.

    Attributes:
        source: name for reports: the file, or the runs.
        repeats: number of runs from which it was learned.
        steps: all steps of the repeats.
        sampled: the steps on which tensors are compared.
        tensors: the expected values of each tensor.
        loss: median loss over the last quarter of the steps; None if no repeat has a finite loss there.
        skipped: share of the steps that a loss scaler skipped.
        bad_losses: steps with a non-finite loss in any repeat.
        provenance: versions, device, command, runs, model.
    """

    source: str
    repeats: int
    steps: tuple[int, ...]
    sampled: tuple[int, ...]
    tensors: Mapping[Key, Expected]
    loss: Learned | None
    skipped: Learned
    bad_losses: frozenset[int] = frozenset()
    provenance: Mapping[str, Any] = field(default_factory=dict)


def learn_repeats(views: Sequence[RunView], sampled: Sequence[int], source: str) -> Baseline:
    """:func:`learn` over all steps, after checking that the repeats have the same steps.

    Raises:
        IncomparableRunsError: the repeats have different steps.
    """
    steps = usable_steps(views[0])
    for view in views[1:]:
        if (different := step_mismatch(usable_steps(view), steps)) is not None:
            raise IncomparableRunsError(f"{view.run.origin} is no repeat of {views[0].run.origin}: {different}")
    return learn(views, sorted(steps), sampled, source)


def learn(views: Sequence[RunView], steps: Sequence[int], sampled: Sequence[int], source: str) -> Baseline:
    """Learn a baseline from healthy repeats of one training, over ``steps``.

    ``sampled`` are the steps on which to summarise tensors; every repeat must have sampled them.
    """
    tables = [summaries(view, sampled) for view in views]
    losses = [v for v in (typical_loss(view, loss_window(steps)) for view in views) if v is not None]
    return Baseline(
        source=source,
        repeats=len(views),
        steps=tuple(steps),
        sampled=tuple(sampled),
        tensors=learn_tensors(tables),
        loss=_learned_figure(losses, _UNMEASURED_LOSS * abs(median(losses))) if losses else None,
        skipped=_learned_figure([skipped_share(view, steps) for view in views], _UNMEASURED_SKIPPED),
        bad_losses=frozenset(step for view in views for step in bad_losses(view, steps)),
        provenance=provenance(views),
    )


def learn_tensors(tables: Sequence[Mapping[Key, Summary]]) -> dict[Key, Expected]:
    """The expected values of each tensor that every repeat has, from the summaries of the repeats."""
    keys = [key for key in tables[0] if all(key in table for table in tables[1:])]
    values = {key: [metrics_of(table[key], key[2]) for table in tables] for key in keys}
    own = {
        (key, name): robust_spread([found[name] for found in per_run])
        for key, per_run in values.items()
        for name in per_run[0]
        if all(name in found for found in per_run)
    }
    typical = _typical(own)
    starts = _distinct_starts(tables, keys)
    expected = {}
    for key in keys:
        summary = tables[0][key]
        metrics = {}
        for name in values[key][0]:
            if (key, name) in own:
                center = median(found[name] for found in values[key])
                floor = least_spread(_UNITS[name], summary, center)
                measured = moderated(own[key, name], typical[key[2], name], len(tables))
                spread = max(floor, measured) if len(tables) > 1 else floor + _unmeasured(name)
                metrics[name] = Learned(center, spread)
        expected[key] = Expected(
            summary.dtype,
            summary.shape,
            summary.module_class,
            summary.order,
            frozenset().union(*(table[key].badness for table in tables)),
            metrics,
            tuple(tables[at][key].start for at in starts),
        )
    return expected


def _unmeasured(name: str) -> float:
    return _UNMEASURED.get(name, _UNMEASURED[_UNITS[name]])


def least_spread(unit: str, summary: Summary, center: float) -> float:
    """The smallest spread to assume for a figure: that of rounding and chance alone.

    In binades: four unit roundoffs of the dtype (the limit of a relative L2 error, see :mod:`.rounding`), plus the
    standard deviation of log2 of the RMS of ``n`` independent Gaussian elements, ``1 / (ln 2 sqrt(2 n))``. As a
    fraction: the standard deviation of a count of independent elements, plus one element.
    """
    elements = max(1, summary.numel_per_step)
    if unit == "binades":
        return (4.0 * unit_roundoff(summary.dtype) + 1.0 / math.sqrt(2.0 * elements)) / math.log(2.0)
    share = min(1.0, max(0.0, center))
    return math.sqrt(share * (1.0 - share) / elements) + 1.0 / elements


def spread_of_zero(name: str, shape: Sequence[int], repeats: int) -> float:
    """The spread of a share that was zero in every repeat: one element, plus the assumed spread if there is one run."""
    return 1.0 / max(1, math.prod(shape)) + (_unmeasured(name) if repeats < 2 else 0.0)


def _typical(own: Mapping[tuple[Key, str], float]) -> dict[tuple[str, str], float]:
    """Median spread by ``(kind of tensor, metric)``; over all kinds if a kind has too few tensors."""
    groups: dict[tuple[str, str], list[float]] = {}
    every: dict[str, list[float]] = {}
    for (key, name), spread in own.items():
        groups.setdefault((key[2], name), []).append(spread)
        every.setdefault(name, []).append(spread)
    return {
        (kind, name): median(spreads if len(spreads) >= _FEWEST_TENSORS else every[name])
        for (kind, name), spreads in groups.items()
    }


def _learned_figure(values: Sequence[float], unmeasured: float) -> Learned:
    """A figure of the whole run. Few repeats may agree by chance, so half of the assumed spread is the minimum."""
    spread = robust_spread(values) if len(values) > 1 else 0.0
    return Learned(median(values), max(spread, unmeasured if len(values) < 2 else 0.5 * unmeasured))


def _distinct_starts(tables: Sequence[Mapping[Key, Summary]], keys: Iterable[Key]) -> list[int]:
    """Indices of the first ``MAX_STARTS`` repeats that began from different weights or data."""
    chosen: list[int] = []
    marks = [key for key in keys if key[2] in ("weight", "batch", "input")]
    seen = set()
    for at, table in enumerate(tables):
        mark = tuple(table[key].start for key in marks)
        if mark not in seen and len(chosen) < MAX_STARTS:
            seen.add(mark)
            chosen.append(at)
    return chosen


def provenance(views: Sequence[RunView]) -> dict[str, Any]:
    """The origin of a baseline: enough to judge whether it still applies, and to record it again."""
    facts, info = views[0].any_facts, views[0].run.info
    device = facts.get("device") or {}
    options = info.get("options") or {}
    return {
        "versions": {k: str(v) for k, v in (facts.get("versions") or {}).items() if v is not None},
        "device": " ".join(str(device[k]) for k in ("type", "name") if device.get(k)),
        "command": without_secrets(str(word) for word in info.get("command") or ()),
        "recorded": str(info.get("started") or ""),
        "every": options.get("every"),
        "runs": [view.run.origin for view in views],
        "roots": roots_of(views[0]),
    }


def roots_of(view: RunView) -> dict[str, str]:
    """The size of each root of a run, in words."""
    return {
        str(root.get("name")): f"{len(root.get('modules') or ())} modules, {_parameters(root):,} parameters"
        for root in view.any_facts.get("roots") or ()
    }


def _parameters(root: Mapping[str, Any]) -> int:
    return sum(math.prod(int(n) for n in p.get("shape") or ()) for p in root.get("parameters") or ())


def learn_from(runs: Sequence[Run]) -> Baseline:
    """The baseline of healthy repeats, over all their steps.

    Raises:
        NothingRecordedError: a run holds no training step.
        IncomparableRunsError: the repeats have different steps, or none that all of them sampled.
    """
    views = [view_of(run) for run in runs]
    sampled = sampled_by_all([usable_steps(view) for view in views])
    if not sampled:
        raise IncomparableRunsError("no step was sampled in all of these runs; record them with the same --every")
    return learn_repeats(views, sampled, ", ".join(run.origin for run in runs))


def without_secrets(command: Iterable[str]) -> list[str]:
    """Replace ``abc`` in ``--api-key abc`` and ``HF_TOKEN=abc`` by ``<hidden>``; numbers (``--max-token 512``) stay."""
    out: list[str] = []
    hide = False
    for word in command:
        name, equals, value = word.partition("=")
        if hide and not word.startswith("-"):
            out.append(word if _is_number(word) else HIDDEN)
            hide = False
            continue
        hide = not equals and word.startswith("-") and _is_secret(name)
        out.append(f"{name}={HIDDEN}" if equals and _is_secret(name) and not _is_number(value) else word)
    return out


def _is_secret(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and not _SECRET.isdisjoint(re.split(r"[._-]", match[1].lower()))


def _is_number(value: str) -> bool:
    return re.fullmatch(r"[-+.\deE]+", value) is not None
