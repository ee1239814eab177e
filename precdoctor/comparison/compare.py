"""Compares two runs, for ``compare A B``: the first difference in bits, the drift of each tensor, and regressions."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precdoctor.comparison.divergence import BitComparison, Divergence, compare_bits
from precdoctor.comparison.drift import Drift, drifts
from precdoctor.comparison.gate import outcome_of, reported_by_code
from precdoctor.comparison.lines import Line, findings_of, location_of
from precdoctor.comparison.pairing import Pairing, pair, subject
from precdoctor.comparison.predictions import Applied, applied_to
from precdoctor.comparison.regressions import REGRESSIONS, Regression
from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, RuleOutcome, Severity, Status
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.engine import RuleOptions, describe, describe_recorder, resolve_options, view_of
from precdoctor.diagnosis.ranking.ending import ending, facts_of_end
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import IncomparableRunsError
from precdoctor.runlog import open_run
from precdoctor.runlog.reader import Run

#: Largest difference of losses, in nats, at which two trainings count as the same for practical purposes.
LOSS_GAP = 0.01
FIRST_DIFFERENCE = Regression(
    "PD810", "first-difference", Severity.INFO,
    "The first tensor whose bits differ between two runs; with --ops the first op, a warning where it differs by more "
    "than rounding in its format explains.",
    checked="Reported by compare.",
)  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare A B``; A is the reference.

    Attributes:
        a, b: the runs' paths.
        common_steps, sampled_steps: the steps of both runs, and those that both sampled.
        paired: number of tensors that both runs have.
        only_a, only_b: the tensors of one run alone.
        renamed: modules of B with another name in A, as ``(name in B, name in A)``.
        bits: the comparison of fingerprints.
        loss_a, loss_b: the losses at the last common step.
        loss_differs_at: the first step at which the losses differ at all; None if there is none.
        loss_gap_at: the step since which the losses have been more than :data:`LOSS_GAP` apart; None if they end
            closer.
        drifts: the drift of every paired tensor, largest first.
        lines: the comparisons of the regressions (PD8xx), B against A.
        notes: remarks, one sentence each.
        applied: if B was recorded with ``--apply``: the changes, and whether the predictions came true.
        diagnosis: the findings (PD8xx), in the form that every report takes.
    """

    a: str
    b: str
    common_steps: tuple[int, ...]
    sampled_steps: tuple[int, ...]
    paired: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...]
    bits: BitComparison
    loss_a: float | None
    loss_b: float | None
    loss_differs_at: int | None
    loss_gap_at: int | None
    drifts: tuple[Drift, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    diagnosis: Diagnosis
    applied: Applied | None = None

    @property
    def first_to_move(self) -> tuple[Drift, ...]:
        """Tensors that moved (see :attr:`Drift.moved_at`), the earliest first, in execution order within a step."""
        moved = [(d.moved_at, math.inf if d.order is None else d.order, d) for d in self.drifts]
        return tuple(d for at, _, d in sorted((m for m in moved if m[0] is not None), key=lambda m: (m[0], m[1])))


def compare(
    a: Run | str | os.PathLike[str],
    b: Run | str | os.PathLike[str],
    *,
    renames: Sequence[tuple[str, str]] = (),
    options: RuleOptions | None = None,
) -> Comparison:
    """Compare run ``b`` with run ``a``, the reference.

    Args:
        a, b: open runs, or the paths of their directories.
        renames: ``(prefix in a, prefix in b)`` of module names that changed.
        options: changed thresholds, by regression (PD8xx).

    Raises:
        RunNotFoundError, RunUnreadableError: as :func:`precdoctor.open_run`.
        NothingRecordedError: a run holds no training step.
        IncomparableRunsError: the runs have different models, or no steps in common.
        UsageError: an unknown regression or option.
    """
    settings = resolve_options(options or {}, REGRESSIONS)
    a, b = open_run(a), open_run(b)
    first, second = view_of(a), view_of(b)
    pairing = pair(second, first, [(new, old) for old, new in renames])
    if isinstance(pairing, str):
        raise IncomparableRunsError(f"{b.path} cannot be compared with {a.path}: {pairing}")
    bits = compare_bits(first, second, pairing.sampled, pairing.names)
    all_drifts = drifts(first, second, pairing.sampled, pairing.names)
    regressions = [r for r in REGRESSIONS if r.compare is not None]
    lines = reported_by_code([x for r in regressions for x in r.lines(pairing, settings[r.code])], regressions)
    outcomes = [outcome_of(r, lines[r.code], pairing.scope) for r in regressions]
    flat = [line for group in lines.values() for line in group]
    findings = [*findings_of(flat, 1), *_first_difference(bits.first)]
    last = pairing.losses[-1] if pairing.losses else None
    return Comparison(
        a=str(a.path),
        b=str(b.path),
        common_steps=tuple(pairing.steps),
        sampled_steps=tuple(pairing.sampled),
        paired=sum(1 for _ in pairing.common),
        only_a=_names(pairing.expected.keys() - pairing.found.keys()),
        only_b=_names(pairing.found.keys() - pairing.expected.keys()),
        renamed=tuple((".".join(filter(None, n)), ".".join(filter(None, o))) for n, o in pairing.names.items()),
        bits=bits,
        loss_a=last[2] if last else None,
        loss_b=last[1] if last else None,
        loss_differs_at=next((s for s, y, x in pairing.losses if not _same(x, y)), None),
        loss_gap_at=_gap(pairing),
        drifts=tuple(all_drifts),
        lines=tuple(flat),
        notes=tuple(_notes(first, second)),
        diagnosis=_diagnosis(first, second, findings, [*outcomes, _bits_outcome(bits)]),
        applied=applied_to(first, second),
    )


def _names(keys: Iterable[Any]) -> tuple[str, ...]:
    return tuple(sorted(subject(key) for key in keys))


def _same(x: float, y: float) -> bool:
    return x == y or (math.isnan(x) and math.isnan(y))


def _gap(pairing: Pairing) -> int | None:
    """The step since which the losses have stayed more than ``LOSS_GAP`` apart; None if they end closer."""
    since = None
    for step, y, x in pairing.losses:
        apart = not (math.isnan(x) and math.isnan(y)) and not abs(y - x) <= LOSS_GAP
        since = (step if since is None else since) if apart else None
    return since


def _first_difference(first: Divergence | None) -> list[Finding]:
    if first is None:
        return []
    tensor = subject(first.key)
    location = replace(
        location_of(first.key, first.step, first.module_class), root=first.key[0] or None, rank=first.rank
    )
    evidence = {
        "equal_before": first.equal,
        "differing_on_the_step": first.differing,
        "last_equal_step": first.last_equal_step,
        "amax": {"from": first.amax[0], "to": first.amax[1]},
    }
    title = f"the runs part at step {first.step}: {tensor}"
    code, name, severity = FIRST_DIFFERENCE.code, FIRST_DIFFERENCE.name, FIRST_DIFFERENCE.severity
    return [Finding(code, name, severity, 1.0, title, first.sentence, location, evidence=evidence)]


def _bits_outcome(bits: BitComparison) -> RuleOutcome:
    code, name = FIRST_DIFFERENCE.code, FIRST_DIFFERENCE.name
    if not bits.compared:
        return RuleOutcome(code, name, Status.NOT_APPLICABLE, "no tensor has a fingerprint in both runs")
    if bits.first is None:
        reason = f"{plural(bits.compared, 'tensor')} on {plural(bits.steps, 'step')} equal in every bit"
        return RuleOutcome(code, name, Status.PASSED, reason)
    return RuleOutcome(code, name, Status.FAILED, f"step {bits.first.step}, {subject(bits.first.key)}")


def _diagnosis(a: RunView, b: RunView, findings: Sequence[Finding], outcomes: Sequence[RuleOutcome]) -> Diagnosis:
    missing = [m for m in (a.missing, b.missing) if m is not None]
    if missing:
        outcomes = [
            replace(o, status=Status.INDETERMINATE, reason=f"nothing found in {o.reason}, but {missing[0]}")
            if o.status is Status.PASSED
            else o
            for o in outcomes
        ]
    ordered = tuple(sorted(findings, key=lambda f: (-f.severity.weight, f.code)))
    run = {**describe(b), "compared_with": describe(a)}
    return Diagnosis(run=run, findings=ordered, rules=tuple(outcomes), recorder=describe_recorder(b))


def _notes(a: RunView, b: RunView) -> list[str]:
    """Remarks on the two runs: different step numbers, where each becomes non-finite, gaps in a log, how each ended."""
    first, second = _first_bad(a), _first_bad(b)
    notes = list(_numbered_apart(a, b))
    if first is not None and second is not None:
        if "applied" in b.run.info:
            notes.append(
                f"the first run becomes non-finite at step {first}, the second, changed, at step {second}: "
                "diagnose that one for what is left"
            )
        elif first == second:
            notes.append(f"both runs become non-finite at step {first}: structural, a restart will not help")
        else:
            notes.append(
                f"the first run becomes non-finite at step {first}, the second at step {second}: "
                "the failure depends on chance (data order, seed, hardware)"
            )
    elif first is not None or second is not None:
        which, step = ("first", first) if first is not None else ("second", second)
        notes.append(f"only the {which} run becomes non-finite, at step {step}")
    for name, view in (("first", a), ("second", b)):
        if view.missing is not None:
            notes.append(f"the log of the {name} run has gaps: {view.missing}")
        if (sentence := ending(facts_of_end(view), f"the command of the {name} run")) is not None:
            notes.append(sentence)
    return notes


def _numbered_apart(a: RunView, b: RunView) -> Iterator[str]:
    """A remark if one run resumed a training, so that equal step numbers are different steps of the training."""
    steps_made = [next((n for p in view.processes if (n := sum(view.steps_before(p).values()))), 0) for view in (a, b)]
    begun = [int(view.steps["step"].min()) for view in (a, b)]
    if steps_made[1] - begun[1] != steps_made[0] - begun[0] and len(a.optimizers) == len(b.optimizers) == 1:
        which, resumed = ("second", 1) if steps_made[1] - begun[1] > steps_made[0] - begun[0] else ("first", 0)
        yield (
            f"the {which} run resumed after {plural(steps_made[resumed], 'step')} and its steps count from "
            f"{begun[resumed]}, so other steps of the training are compared: record it with "
            f"--first-step {steps_made[resumed]}"
        )


def _first_bad(view: RunView) -> int | None:
    """The first step with a non-finite loss, or with another non-finite tensor and not skipped by a loss scaler."""
    bad = [
        s.step
        for steps in view.timeline.values()
        for s in steps
        if s.loss_is_bad or (s.non_finite > 0 and not s.skipped)
    ]
    return min(bad, default=None)
