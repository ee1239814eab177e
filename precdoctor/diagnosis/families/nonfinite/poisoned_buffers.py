"""PD106: a buffer becomes non-finite and stays so, while the loss is finite again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import and_more, plural
from precdoctor.diagnosis.survey.frames import PARAMETER, at, groups, largest, parameters, sums
from precdoctor.diagnosis.survey.rows import Parameter, dotted, location, path_evidence, path_to
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
Floating-point buffers (running statistics of a batch norm, moving averages, normalisers of observations) that were
finite and hold a NaN or an infinity from some step to the end of the recording. Buffers that are non-finite from the
start (observers that begin at infinity) do not count, nor do masks, which hold nothing worse than -Inf. If the failing
step was replayed, PD101 names the op and includes this finding.
""",
    matters="""
A loss scaler that skips the step, or `if not loss.isfinite(): continue`, saves the weights, but the forward pass has
already written the buffer. Running statistics are an average of the past: one NaN stays. Training goes on with the
statistics of the batch and looks healthy, while every evaluation and every checkpoint from that step on is worthless.
""",
    example="""
    loss = criterion(model(batch), target)   # one batch is too large: batch norm's running_var is NaN from here on
    if not loss.isfinite():
        continue                             # too late for running_var
""",
    remedy="""
Resume from a checkpoint before the step that the finding names, or reset the statistics and run some good batches in
training mode before any evaluation. To prevent it, check the batch before the forward pass, or mend the op that makes
it non-finite inside the model.
""",
    confidence="""
0.97: every element was counted, and the buffer was finite before. 0.8 if fewer than two steps were recorded since.
""",
    references=(
        "PyTorch documentation: torch.nn.BatchNorm2d, running statistics and momentum",
        "IEEE 754-2019, section 6.2 (NaN propagates through every average)",
    ),
)


@dataclass(frozen=True)
class _Buffer:
    """A buffer that became non-finite: its last finite step, the first bad one since, the number of bad ones since."""

    finite: int
    first_bad: int
    bad: int


def check(view: RunView, options: Options) -> Checked:
    """One finding: the first poisoned buffer, with the others in its evidence."""
    rows = _rows(view)
    if not len(rows):
        return Checked.not_applicable("no floating-point buffer was recorded")
    seen = plural(int(groups(rows, PARAMETER).max()) + 1, "buffer")
    poisoned = _poisoned(rows, options["min_steps"])
    if not poisoned:
        return Checked((), f"{seen}, none that became non-finite and stayed so")
    return Checked([_finding(view, poisoned, options)], f"{len(poisoned):,} of {seen} became non-finite")


def poisoned_at(view: RunView, process: Process, steps: Collection[int]) -> tuple[str, int, int] | None:
    """Return which buffers of a process are non-finite from one of these steps on; last finite step; that step."""
    found = {p: b for (own, p), b in _poisoned(_rows(view), 1.0).items() if own == process and b.first_bad in steps}
    if not found:
        return None
    name = dotted(*next(iter(found))[1:])
    return f"buffer `{name}`{and_more(len(found))}", *min((b.finite, b.first_bad) for b in found.values())


def _rows(view: RunView) -> pd.DataFrame:
    return view.measured((), ("buffer",), columns=("nan", "pos_inf")).sort_values("step", kind="stable")


def _poisoned(rows: pd.DataFrame, min_steps: float) -> dict[tuple[Process, Parameter], _Buffer]:
    """Buffers that were finite and then non-finite on at least ``min_steps`` recorded steps up to their last one.

    Args:
        rows: all rows of buffers, in order of step; the log has one whenever a buffer changes.
    """
    ids, at_ = groups(rows, ("rank", "attempt", *PARAMETER)), np.arange(len(rows))
    bad = ((rows["nan"] > 0) | (rows["pos_inf"] > 0)).to_numpy()
    finite = largest(ids, np.where(bad, np.nan, at_))
    since = bad & (at_ > finite[ids])
    first, counts = -largest(ids, np.where(since, -at_, np.nan)), sums(ids, since)
    found = {}
    for i in np.flatnonzero(counts >= max(1.0, min_steps)):
        first_row = rows.iloc[[int(first[i])]]
        [(process, step)] = at(first_row)
        last_finite = int(rows["step"].iloc[int(finite[i])])
        found[process, parameters(first_row)[0]] = _Buffer(last_finite, step, int(counts[i]))
    return found


def _finding(view: RunView, poisoned: Mapping[tuple[Process, Parameter], _Buffer], options: Options) -> Finding:
    step = min(b.first_bad for b in poisoned.values())
    (process, place), buffer = next((k, b) for k, b in poisoned.items() if b.first_bad == step)  # first in the model
    rows = view.rows(process, step)
    row = next(r for r in rows if r.owner == place and r.kind == "buffer")
    finite = min(b.finite for b in poisoned.values())
    name = dotted(*place[1:])
    losses = [s.loss for s in view.timeline.get(process, ()) if s.step > step and s.loss is not None]
    since = f"Since then the loss was finite on {plural(len(losses), 'step')}: training hides it. " if losses else ""
    message = (
        f"`{name}` ({row.module_class or 'buffer'}) was finite at step {finite} and holds {row.count_words()} at step "
        f"{step} and on all {plural(buffer.bad, 'recorded step')} from then on (limit {options['min_steps']:g}). "
        f"{since}Every checkpoint from step {step} on holds {plural(len(poisoned), 'non-finite buffer')}; the last "
        f"clean one is at or before step {finite}."
    )
    forward = [r for r in rows if r.kind in ("batch", "input", "output")]
    first_bad = next((r for r in forward if r.bad and not r.mask_like), None)
    if first_bad is not None:
        message += f" First non-finite value of that step: {first_bad.label}, {first_bad.count_words()}."
    few = buffer.bad < 2
    return RULE.finding(
        confidence=0.8 if few else 0.97,
        title=f"`{name}` is non-finite since step {step}" + (", although the loss is finite" if losses else ""),
        message=message,
        location=location(row, Phase.FORWARD, process, step),
        evidence={
            "nonfinite_elements": row.non_finite,
            "limit": options["min_steps"],
            "buffers": [dotted(*place[1:]) for _, place in poisoned][:16],
            "finite_losses_since": len(losses),
            "last_finite_step": finite,
            "last_bad_step": step,
            "path": path_evidence([*(path_to(forward, first_bad) if first_bad is not None else ()), row]),
            "confidence_reason": "fewer than two steps were recorded since" if few else "every element was counted",
        },
        prescription=_reset(place, len(poisoned)),
    )


def _reset(place: Parameter, count: int) -> Prescription:
    return Prescription(
        title=f"reset running statistics and run good batches before evaluating: poisoned buffers {count} -> 0",
        change={"module": place[1], "reset_running_stats": True},
        predicted={"poisoned_buffers": {"from": count, "to": 0}},
        snippet=(
            "import torch\n\n"
            "for module in model.modules():\n"
            "    if hasattr(module, 'reset_running_stats'):\n"
            f"        module.reset_running_stats()  # {module_expression(place[1])} among them\n"
            "model.train()\n"
            "with torch.no_grad():\n"
            "    for batch in good_batches:\n"
            "        model(batch)\n"
        ),
    )


RULE = Rule(
    code="PD106",
    name="poisoned-buffers",
    severity=Severity.ERROR,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption(
            "min_steps", 1.0, "steps", "Recorded steps up to the last one on which it must be non-finite.",
            "One: an average never loses a NaN.", minimum=1.0,
        ),
    ),
    check=check,
)  # fmt: skip
