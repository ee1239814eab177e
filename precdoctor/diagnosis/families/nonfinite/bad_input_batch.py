"""PD104: a batch that is non-finite, or far above the range of all batches before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from precdoctor.diagnosis.analyses.bad_data import as_given, delivered_tensor, drop_samples, mend_data
from precdoctor.diagnosis.analyses.replays import replay_at
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity
from precdoctor.diagnosis.claims.relations import when, while_it_lasts
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage, fraction
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.bad_steps import incident_steps
from precdoctor.diagnosis.families.nonfinite.incident import Incident, Report
from precdoctor.diagnosis.families.nonfinite.incident_report import check_incidents, checked_words, confidence_options
from precdoctor.diagnosis.families.nonfinite.poisoned_buffers import poisoned_at
from precdoctor.diagnosis.families.nonfinite.tensor_causes import provenance, provenance_words
from precdoctor.diagnosis.survey.frames import AT, at, firsts, groups, keys, on_steps, rows_of
from precdoctor.diagnosis.survey.rows import Key, TensorRow, grouped, location, range_evidence, tensor_location
from precdoctor.diagnosis.survey.view import IDENTITY, Process, RunView

PAGE = RulePage(
    finds="""
A model's argument that holds NaN or Inf as the model is called, on a step that became non-finite, or a batch with a
largest magnitude many binades above that of every batch before it. If a data loader delivered the values, they are the
data's. If it delivered finite ones, code between the loader and the model is at fault. Without a loader the log does
not show which; a second, traced run (the command `autopsy`) does. A `-inf` mask passed as an argument is not bad data,
and neither are NaN that batches of healthy steps also hold. A non-finite batch that did no harm is reported as
information.
""",
    matters="""
Data comes first in every triage: the model is not at fault for a NaN in its input, and no change of precision, learning
rate or loss scale mends it. One extreme sample can move the weights so far that the run overflows one or two steps
later.
""",
    example="""
    features = (x - mean) / std        # a constant column: std is 0, the column becomes NaN
    x = raw / raw.sum(1, keepdim=True) # a row of zeros; no data is bad, this line is

Or a sensor that writes 1e30 for "missing", a label file with an empty cell, a corrupt shard.
""",
    remedy="""
If the data holds the values, drop or impute the sample that the finding names, and find the source: a missing value, a
failed parse, a standard deviation of 0. With a `DataLoader` that uses torch's own collation the sample is an index of
the data set (of the whole one, behind `random_split`); otherwise it is a position in the batch. Resume from a
checkpoint at or before the step that the finding names.
""",
    confidence="""
0.97 for a non-finite batch on a step that became non-finite, if a data loader showed what it delivered. 0.75 if none
did: data, or code before the model. 0.85 if a second run traced the step and no op of it made the values. 0.6 for an
extreme batch alone; 0.9 if the run became non-finite within `follow_steps` steps of it.
""",
    references=("PyTorch documentation: torch.utils.data, torch.isfinite", "docs: concepts, 'Triage order'"),
)


@dataclass(frozen=True)
class _ExtremeBatch:
    """A batch whose amax is far above ``before``, the largest amax of the ``steps_before`` recorded steps before it."""

    process: Process
    step: int
    key: Key
    amax: float
    before: float
    steps_before: int

    @property
    def binades(self) -> float:
        """Binades above all earlier batches."""
        return math.log2(self.amax / self.before)


def check(view: RunView, options: Options) -> Checked:
    """Findings for non-finite batches that led to an incident or did no harm, and for extreme batches."""
    seen = checked_words(view, ("batch",), "input tensor")
    tensors, _ = view.tensor_count(("batch",))
    harmful = check_incidents(view, RULE, options, _report, ("batch",), "input tensor")
    if harmful.findings:
        return Checked([*harmful.findings, *_extreme_findings(view, options)], harmful.reason)
    if tensors == 0:
        return Checked.not_applicable("no root module was given a floating-point argument (token ids are integers)")
    if findings := [*_extreme_findings(view, options), *_harmless_findings(view, options)]:
        return Checked(findings, f"{plural(len(findings), 'suspicious batch')} among {seen}")
    return Checked((), f"{seen}, all finite, none {options['extreme_binades']:g} binades above those before")


# -- non-finite -------------------------------------------------------------------------------------------------------


def _report(view: RunView, incident: Incident) -> Report:
    origin = incident.origin
    assert origin is not None, "an incident without recorded tensors is never PD104"
    row, argument = origin.row, as_given(origin.row)
    replay = replay_at(view, incident.process, incident.step)
    data = (delivered_tensor(replay.bad_data, argument) if replay is not None else None) or argument
    message = f"{incident.at_step(view).capitalize()}, argument `{row.name or '0'}` of {row.root} ({row.dtype}) "
    message += f"holds {row.count_words()}; limit 0." + (data.more or provenance_words(provenance(replay, data)))
    message += incident.consequence_words
    mend = mend_data(data, incident.step, prepared=provenance(replay, data) != "outside-step")
    return Report(data.title(f"`{row.root}`"), f"{message} {incident.resume_advice}", mend)


def _harmless_findings(view: RunView, options: Options) -> list[Finding]:
    """One finding per argument with non-finite values on healthy steps, unless they are usual in this data set."""
    batches = view.survey.batches.to_pandas()
    bad = batches[(batches["nan"] > 0) | (batches["pos_inf"] > 0)]
    incidents = {(process, step) for process, steps in incident_steps(view).items() for step in steps}
    bad = bad[~on_steps(bad, incidents)]
    ids = groups(bad, IDENTITY)
    steps = np.bincount(ids[firsts(groups(bad, (*IDENTITY, "step")))]).tolist()
    first = bad.iloc[firsts(ids)]
    _, all_steps = view.tensor_count(("batch",))
    findings = []
    for i, (key, (process, step), count) in enumerate(zip(keys(first), at(first), steps, strict=True)):
        if count > options["usual_share"] * all_steps:
            continue  # this data set encodes missing values as NaN
        if (poisoned := poisoned_at(view, process, set(bad["step"][ids == i]))) is not None:
            step = poisoned[2]  # noqa: PLW2901 - the batch that did it
        if (row := next((r for r in view.rows(process, step) if r.key == key), None)) is not None:
            findings.append(_harmless_finding(row, process, step, count, poisoned))
    return findings


def _harmless_finding(
    row: TensorRow, process: Process, step: int, steps: int, poisoned: tuple[str, int, int] | None
) -> Finding:
    """The finding on an argument; ``poisoned`` are buffers that became non-finite with it, their last clean step."""
    title = f"{plural(steps, 'batch')} given to `{row.root}` held non-finite values"
    message = f"At step {step}, argument `{row.name or '0'}` of {row.root} ({row.dtype}) holds {row.count_words()}; "
    message += "limit 0. Loss, gradients and weights stayed finite"
    evidence = {"range": range_evidence(row), "bad_batches": steps, "confidence_reason": "the values are in the log"}
    if poisoned is None:
        title += ", so far without harm"
        message += "."
    else:
        buffers, finite, _ = poisoned
        title += f"; {buffers} is non-finite since"
        message += f", {buffers} did not, and training does not mend it. Resume from a checkpoint at or before step "
        message += f"{finite}."
        evidence["last_finite_step"] = finite
    return RULE.finding(
        severity=Severity.INFO if poisoned is None else Severity.ERROR,
        confidence=0.9,
        title=title,
        message=message,
        location=location(row, Phase.DATA, process, step),
        cause="nonfinite-input-batch",
        evidence=evidence,
        prescription=drop_samples(as_given(row), step),
    )


# -- extreme ----------------------------------------------------------------------------------------------------------


def _extreme_findings(view: RunView, options: Options) -> list[Finding]:
    """One finding per argument and process with extreme batches; of ranks with the same step, the most confident."""
    by_argument = grouped(((e.process, e.key), e) for e in _extremes(view, options))
    findings = (((e[0].key, e[0].step), _extreme_finding(view, e, options)) for e in by_argument.values())
    return [max(found, key=lambda f: f.confidence) for found in grouped(findings).values()]


def _extremes(view: RunView, options: Options) -> Iterator[_ExtremeBatch]:
    """Yield each process's extreme batches in order of step: amax far above every earlier one of the argument.

    Earlier calls of the same step count as earlier batches: a sampler that calls the model on its own output sees its
    argument grow from call to call, and that argument is no data.
    """
    columns = ["step", "rank", "attempt", *IDENTITY, "amax", "numel"]
    sampled = view.measured((), ("batch",), columns=("amax", "numel"))
    batches = pd.concat([view.survey.batches.select(columns).to_pandas(), sampled[columns]])
    batches = batches[(batches["amax"] > 0.0) & (batches["numel"] >= options["min_elements"])]
    batches = batches.drop_duplicates([*AT, *IDENTITY]).sort_values([*AT, "call"], kind="stable")
    found, factor = [], 2.0 ** options["extreme_binades"]
    for rows in rows_of(groups(batches, ("rank", "attempt", *IDENTITY[:-1]))):
        amax, step = batches["amax"].to_numpy()[rows].copy(), batches["step"].to_numpy()[rows]
        before = np.append(0, np.cumsum(np.diff(step, prepend=-1) != 0)[:-1])
        while True:
            largest = np.maximum.accumulate(np.append(0.0, amax[:-1]))
            beyond = np.flatnonzero((before >= options["history_steps"]) & (amax > factor * largest))
            if not beyond.size:
                break
            i = beyond[0]
            found.append((int(rows[i]), float(amax[i]), float(largest[i]), int(before[i])))
            amax[i] = 0.0  # an extreme batch must not raise the limit for the next one
    for row, reached, limit, steps in sorted(found):
        frame = batches.iloc[[row]]
        yield _ExtremeBatch(*at(frame)[0], keys(frame)[0], reached, limit, steps)


def _extreme_finding(view: RunView, extremes: list[_ExtremeBatch], options: Options) -> Finding:
    e = extremes[0]
    until = e.step + int(options["follow_steps"])
    harmed = sorted(s for steps in incident_steps(view).values() for s in steps if e.step <= s <= until)
    row = next((r for r in view.rows(e.process, e.step) if r.key == e.key), None)
    clamp = 2.0 ** math.ceil(math.log2(e.before))
    last = max((f.step for f in view.timeline.get(e.process, ()) if f.step < e.step), default=None)
    skipped = bool(harmed) and all((f := view.step_facts(e.process, s)) is not None and f.skipped for s in harmed)
    if skipped:
        follow = "The loss scaler skipped the step, so the weights are intact."
    elif harmed:
        follow = f"The run became non-finite at step {harmed[0]}. Resume from a checkpoint at or before step {last}."
    else:
        follow = "So far nothing has become non-finite."
    evidence = {
        "amax": e.amax,
        "largest_before": e.before,
        "binades_above": round(e.binades, 2),
        "limit_binades": options["extreme_binades"],
        "history_steps": e.steps_before,
        "steps": [x.step for x in extremes[:16]],
        "explains_until": until if harmed else e.step,
        "last_finite_step": None if skipped else last,
        "confidence_reason": "an incident followed" if harmed else "no incident followed",
    }
    if row is not None:
        evidence["range"] = range_evidence(row)
    return RULE.finding(
        severity=Severity.ERROR if harmed and not skipped else Severity.WARNING,
        confidence=0.9 if harmed else 0.6,
        title=f"the batch of step {e.step} is {e.binades:.1f} binades larger than any before it",
        message=f"At step {e.step}, argument `{e.key[3] or '0'}` of {e.key[0]} reaches {e.amax:.4g}. The "
        f"{e.steps_before} batches before it reached at most {e.before:.4g} ({e.binades:.1f} binades less, limit "
        f"{options['extreme_binades']:g}). {follow}",
        location=tensor_location(e.key, "", "batch", Phase.DATA, e.process, e.step),
        cause="extreme-input-batch",
        evidence=evidence,
        prescription=Prescription(
            title=f"clamp the input to the range of earlier batches (+-{clamp:g}) or drop the sample",
            change={"clamp": clamp},
            predicted={"amax": {"from": e.amax, "to": clamp}},
            snippet=f"batch = batch.clamp(-{clamp!r}, {clamp!r})\n",
        ),
    )


RULE = Rule(
    code="PD104",
    name="bad-input-batch",
    severity=Severity.ERROR,
    triage=Triage.DATA,
    page=PAGE,
    options=(
        *confidence_options(0.97),
        RuleOption(
            "extreme_binades", 10.0, "binades", "How far above every earlier batch a batch counts as extreme.",
            "Chosen empirically: a factor of 1024; normalised data varies by 2 to 3 binades between batches.",
            minimum=1.0, maximum=300.0,
        ),
        RuleOption("history_steps", 8.0, "steps", "Batches before one can be extreme.", minimum=1.0),
        RuleOption(
            "min_elements", 64.0, "elements", "Smaller arguments are never extreme.",
            "Chosen empirically: noise levels, time steps and lengths are single numbers of any size.", minimum=1.0,
        ),
        RuleOption(
            "follow_steps", 2.0, "steps", "Number of steps within which an incident is attributed to an extreme batch.",
            "One step for the weights to move, one for the overflow.",
        ),
        fraction(
            "usual_share", 0.1, "Non-finite values in more batches than this belong to the data set."
        ),
    ),
    explains=when(while_it_lasts, "PD101", "PD102", "PD103", "PD105", "PD106", "PD301", "PD302", "PD603", "PD605"),
    check=check,
)  # fmt: skip
