"""What healthy repeats of a training look like: per tensor and metric a centre and a run-to-run spread."""

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

#: Repeats whose first step is kept tensor by tensor, for runs from the same seed.
MAX_STARTS = 3
#: What stands for a spread that nobody measured (one healthy run), beside rounding: by unit, and by metric where the
#: data alone make more of it, as in the gradient of an embedding.
_UNMEASURED = {"fraction": 0.0025, "binades": 0.25, "zeros": 0.05}
#: Spreads of the run's own figures when there is one healthy run: relative to the loss, and a share of steps.
_UNMEASURED_LOSS, _UNMEASURED_SKIPPED = 0.0125, 0.025
#: Tensors of a kind that say what is typical of it.
_KIN = 8
_UNITS = {metric.name: metric.unit for metric in METRICS}
HIDDEN = "<hidden>"
#: Parts of an option's name that say its value is nobody's business.
_SECRET = frozenset(["auth", "credential", "credentials", "key", "passwd", "password", "pat", "secret", "token"])
_NAME = re.compile(r"-{0,2}([A-Za-z][\w.-]*)")


@dataclass(frozen=True)
class Learned:
    """One figure over the healthy repeats: the median, and one robust standard deviation."""

    center: float
    spread: float


@dataclass(frozen=True)
class Expected:
    """One tensor in the healthy repeats.

    Attributes:
        order: its place in the execution order of a step; None when the log does not know.
        badness: the kinds of non-finite values that healthy repeats have there, such as an attention mask's.
        metrics: by the names of :data:`~precdoctor.comparison.summary.METRICS`.
        starts: its first step in each of the baseline's distinct starts; None where it had no finite element.
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
    """Healthy repeats, ready to hold runs against.

    Attributes:
        source: the file or the runs, as reports call it.
        repeats: how many runs it was learned from.
        steps: all steps of the repeats.
        sampled: those the tensors were compared on.
        loss: over the last quarter of the steps, in nats; None without a finite loss.
        skipped: the share of steps a loss scaler skipped.
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


def learn_alike(views: Sequence[RunView], sampled: Sequence[int], source: str) -> Baseline:
    """:func:`learn` over all steps of repeats that have the same ones.

    Raises:
        IncomparableRunsError: the repeats have different steps.
    """
    steps = usable_steps(views[0])
    for view in views[1:]:
        different = step_mismatch(usable_steps(view), steps)
        if different is not None:
            raise IncomparableRunsError(f"{view.run.origin} is no repeat of {views[0].run.origin}: {different}")
    return learn(views, sorted(steps), sampled, source)


def learn(views: Sequence[RunView], steps: Sequence[int], sampled: Sequence[int], source: str) -> Baseline:
    """The baseline of ``views``, healthy repeats of one training, over ``steps``, of which ``sampled`` in each."""
    tables = [summaries(view, sampled) for view in views]
    found = [v for v in (typical_loss(view, loss_window(steps)) for view in views) if v is not None]
    return Baseline(
        source=source,
        repeats=len(views),
        steps=tuple(steps),
        sampled=tuple(sampled),
        tensors=learn_tensors(tables),
        loss=_learned_run(found, _UNMEASURED_LOSS * abs(median(found))) if found else None,
        skipped=_learned_run([skipped_share(view, steps) for view in views], _UNMEASURED_SKIPPED),
        bad_losses=frozenset(step for view in views for step in bad_losses(view, steps)),
        provenance=provenance(views),
    )


def learn_tensors(tables: Sequence[Mapping[Key, Summary]]) -> dict[Key, Expected]:
    """Per tensor what to expect; tensors that not every repeat has are not expected of the next one."""
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
    """What rounding and chance alone make of a figure: no measured spread counts as smaller.

    In binades, four unit roundoffs of the dtype (the first limit of a relative L2 error), and the standard deviation of
    log2 of the RMS of independent Gaussian elements, ``1 / (ln 2 sqrt(2 n))``; as a fraction, the standard deviation of
    a count of independent elements, and one element.
    """
    elements = max(1, summary.numel_per_step)
    if unit == "binades":
        return (4.0 * unit_roundoff(summary.dtype) + 1.0 / math.sqrt(2.0 * elements)) / math.log(2.0)
    share = min(1.0, max(0.0, center))
    return math.sqrt(share * (1.0 - share) / elements) + 1.0 / elements


def spread_of_zero(name: str, shape: Sequence[int], repeats: int) -> float:
    """The spread of a share that was zero in every repeat: one element, and what one run leaves open."""
    return 1.0 / max(1, math.prod(shape)) + (_unmeasured(name) if repeats < 2 else 0.0)


def _typical(own: Mapping[tuple[Key, str], float]) -> dict[tuple[str, str], float]:
    """Per kind of tensor and metric the median spread; of all kinds where one has too few tensors to tell."""
    groups: dict[tuple[str, str], list[float]] = {}
    every: dict[str, list[float]] = {}
    for (key, name), spread in own.items():
        groups.setdefault((key[2], name), []).append(spread)
        every.setdefault(name, []).append(spread)
    return {
        (kind, name): median(spreads if len(spreads) >= _KIN else every[name])
        for (kind, name), spreads in groups.items()
    }


def _learned_run(values: Sequence[float], unmeasured: float) -> Learned:
    """A figure of the run; a few repeats may agree by chance, so half of what is assumed of one run stays."""
    spread = robust_spread(values) if len(values) > 1 else 0.0
    return Learned(median(values), max(spread, unmeasured if len(values) < 2 else 0.5 * unmeasured))


def _distinct_starts(tables: Sequence[Mapping[Key, Summary]], keys: Iterable[Key]) -> list[int]:
    """The repeats that began from different weights or data, the first few of them."""
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
    """Where a baseline came from: enough to judge whether it still applies, and to make it again."""
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
    """Per model of a run its size in words."""
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
    return learn_alike(views, sampled, ", ".join(run.origin for run in runs))


def without_secrets(command: Iterable[str]) -> list[str]:
    """``--api-key abc`` and ``HF_TOKEN=abc`` with ``<hidden>`` for ``abc``; numbers (``--max-token 512``) stay."""
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
    found = _NAME.fullmatch(name)
    return found is not None and not _SECRET.isdisjoint(re.split(r"[._-]", found[1].lower()))


def _is_number(value: str) -> bool:
    return re.fullmatch(r"[-+.\deE]+", value) is not None
