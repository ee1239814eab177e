"""The entry point of a diagnosis: runs the rules over one run, folds and sorts their findings, and states the outcome
of each rule.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from precdoctor.diagnosis.advice.prescription_order import worthwhile_first
from precdoctor.diagnosis.analyses.recording_cost import overhead
from precdoctor.diagnosis.analyses.replicas import coordinates
from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, RuleOutcome, Severity, Status
from precdoctor.diagnosis.claims.rule import ENOUGH_STEPS, Checked, Options, Rule, RuleOption
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.ranking.consequences import fold
from precdoctor.diagnosis.ranking.ending import facts_of_end
from precdoctor.diagnosis.registry import RELATIONS, RULES, Named, find, nearest, select_rules
from precdoctor.diagnosis.survey.newer_half import newer_half
from precdoctor.diagnosis.survey.step_facts import own_step
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import NothingRecordedError, PrecdoctorError, UsageError
from precdoctor.runlog import open_run
from precdoctor.runlog.attachment import why_nothing_attached
from precdoctor.runlog.reader import Run
from precdoctor.runlog.shell import quoted_path

_LOG = logging.getLogger(__name__)

#: The options to change: ``{rule code or name: {option name: value}}``.
RuleOptions = Mapping[str, Mapping[str, Any]]


def diagnose(
    run: Run | str | os.PathLike[str],
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    options: RuleOptions | None = None,
) -> Diagnosis:
    """Run the rules over ``run``.

    Args:
        run: an open run, or the path of its directory.
        select: rules to run (codes, names, or prefixes such as ``PD1``); none means all.
        ignore: rules to leave out.
        options: per rule the thresholds to change, e.g. ``{"PD201": {"flushed_share": 0.1}}``.

    Raises:
        UsageError: an unknown rule or option, or a value an option cannot take.
        RunNotFoundError, RunUnreadableError: as :func:`precdoctor.open_run`.
        NothingRecordedError: the run holds no training step.
    """
    rules = select_rules(select, ignore)
    # One settings file serves all commands: its PD8xx entries belong to comparisons, and no rule here has these codes.
    own = {name: changes for name, changes in (options or {}).items() if not name.upper().startswith("PD8")}
    settings = resolve_options(own)
    return diagnose_view(view_of(open_run(run)), rules, settings)


def view_of(run: Run) -> RunView:
    """Return the view of a run that holds at least one recorded step.

    Raises:
        NothingRecordedError: the run holds no training step.
    """
    view = RunView(run)
    if view.steps.empty:
        if run.is_being_written:
            raise NothingRecordedError(
                f"{run.origin} has no step yet, but its command is still running; "
                f"try again when it trains, or type: precdoctor watch {quoted_path(run.path)}"
            )
        if not run.ranks:
            raise NothingRecordedError(f"{run.origin} holds nothing: {why_nothing_attached(run.attach_lines())}")
        why = "no optimizer stepped (torch.func alone, and a step compiled as a whole, cannot be followed)"
        next_command = "`precdoctor record --inference` records runs that only call models"
        if view.cut_short:
            why = f"recording ended in its first step: {view.cut_short}"
            next_command = f"`precdoctor log verify {quoted_path(run.path)}` says what is in it"
        raise NothingRecordedError(
            f"{run.origin} holds no training step: {why}, so there is nothing to judge; {next_command}"
        )
    return view


def diagnose_view(view: RunView, rules: Sequence[Rule], settings: Mapping[str, Options]) -> Diagnosis:
    """Run ``rules`` over a view, with the options of :func:`resolve_options`; a caller can share one view."""
    checked = {}
    for number, rule in enumerate(rules, 1):
        checked[rule.code] = _check(view, rule, settings[rule.code])
        view.run.progress("rules", number, len(rules))
    found = [_with_process(view, _with_model(view, f)) for result in checked.values() for f in result.findings]
    findings = [_with_own_steps(view, worthwhile_first(f)) for f in fold(found, RELATIONS)]
    outcomes = [_outcome(view, rule, checked[rule.code], findings) for rule in rules]
    return Diagnosis(
        run=describe(view), findings=_by_importance(findings), rules=tuple(outcomes), recorder=describe_recorder(view)
    )


class Configurable(Named, Protocol):
    """Anything with a code and thresholds: a rule, or a regression that the gate looks for."""

    @property
    def options(self) -> tuple[RuleOption, ...]: ...


def resolve_options(options: RuleOptions, known: Sequence[Configurable] = RULES) -> dict[str, Options]:
    """Return ``{code: options}`` of all ``known`` rules: the defaults, with the changes of ``options`` applied.

    Raises:
        UsageError: an unknown rule or option, or a value an option cannot take.
    """
    settings: dict[str, Options] = {rule.code: {o.name: o.default for o in rule.options} for rule in known}
    for name, changes in options.items():
        rule = find(name, known)
        if not isinstance(changes, Mapping):
            raise UsageError(f"the options of {rule.code} are a table of names and numbers, got {changes!r}")
        settings[rule.code] = {**settings[rule.code], **dict(_checked_options(rule, changes))}
    return settings


def _checked_options(rule: Configurable, changes: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield the changed options as ``(name, value)``; raises UsageError for unknown names and values out of range."""
    known = {o.name: o for o in rule.options}
    for key, value in changes.items():
        option = known.get(str(key).replace("-", "_"))
        if option is None:
            raise UsageError(f"{rule.code} has no option {key!r}{nearest(str(key), known)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"{rule.code} {option.name} takes a number ({option.unit}), got {value!r}")
        if not option.minimum <= value <= option.maximum:
            limits = f"between {option.minimum:g} and {option.maximum:g}"
            raise UsageError(f"{rule.code} {option.name} takes a number {limits} ({option.unit}), got {value!r}")
        yield option.name, float(value)


def _check(view: RunView, rule: Rule, options: Options) -> Checked:
    """Run one rule. If the log lacks the sampled steps that it needs, it is indeterminate, never passed."""
    if rule.sampled_steps and not view.sampled_steps:
        return Checked.indeterminate("no step was recorded with full statistics")
    try:
        checked = rule.check(view, options)
        if rule.newer_half and not checked.findings and checked.status is not Status.NOT_APPLICABLE:
            later = newer_half(view)
            found = rule.check(later, options) if later is not None else checked
            if later is not None and any(f.severity is not Severity.INFO for f in found.findings):
                return _from_newer_half(found, later.first)
        return _as_notes(checked, view) if rule.settles else checked
    except (PrecdoctorError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - logged with the traceback; the other rules still run
        _LOG.exception("%s %s failed", rule.code, rule.name)
        reason = f"{type(error).__name__} in precdoctor; please report it with the lines on stderr"
        return Checked((), reason, Status.INDETERMINATE, defect=True)


def _from_newer_half(checked: Checked, first: int) -> Checked:
    """State in the findings of the newer half of a run that they are about the steps from ``first`` on."""
    words = f"All of this is about the newer half of the run, from step {first:,} on; the whole is within the limits."
    findings = [
        replace(f, message=f"{f.message} {words}", evidence={**f.evidence, "from_step": first})
        for f in checked.findings
    ]
    return replace(checked, findings=findings, reason=f"{checked.reason}, from step {first:,} on")


def _as_notes(checked: Checked, view: RunView) -> Checked:
    """Turn the findings into notes if the run is too short to tell whether its state lasts."""
    steps = int(view.steps["step"].nunique())
    if steps >= ENOUGH_STEPS:
        return checked
    words = f"A note, because the run has {plural(steps, 'step')}: a fresh model may leave this state by itself."
    findings = [replace(f, severity=Severity.INFO, message=f"{f.message} {words}") for f in checked.findings]
    return replace(checked, findings=findings)


def _outcome(view: RunView, rule: Rule, checked: Checked, findings: Sequence[Finding]) -> RuleOutcome:
    """Return the outcome of a rule, given the findings that remain.

    If rows are missing, "passed" and "not applicable" become indeterminate.
    """
    status, reason = checked.status or Status.PASSED, checked.reason
    if checked.findings:
        kept = any(f.code == rule.code for f in findings)
        status, reason = Status.FAILED, reason if kept else f"{reason}; a consequence of another finding"
    elif status is not Status.INDETERMINATE and view.missing is not None:
        found = f"nothing found in {reason}" if status is Status.PASSED else reason
        status, reason = Status.INDETERMINATE, f"{found}, but {view.missing}"
    return RuleOutcome(rule.code, rule.name, status, reason, checked.defect)


def _by_importance(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort findings by severity, then triage order, then the highest confidence of the rule, then the step."""
    triage = {r.code: r.triage for r in RULES}
    surest: dict[str, float] = {}
    for f in findings:
        surest[f.code] = max(f.confidence, surest.get(f.code, 0.0))

    def key(f: Finding) -> tuple[Any, ...]:
        step = f.location.step
        at = (step is None, step or 0, -f.confidence)
        return (-f.severity.weight, triage.get(f.code, len(RULES)), -surest[f.code], f.code, *at)

    return tuple(sorted(findings, key=key))


def describe(view: RunView) -> dict[str, Any]:
    """Return the facts of a run that head every report: path, command, ranks, steps, versions, how it ended."""
    steps = view.steps
    sampled = view.sampled_steps
    facts = view.any_facts
    before = next((made for p in view.processes if (made := view.steps_before(p))), {})
    return {
        "path": view.run.origin,
        "command": view.run.info.get("command"),
        "cwd": view.run.info.get("cwd"),
        "ranks": len({p.rank for p in view.everyone}),
        "attempts": len(view.everyone),
        "first_step": int(steps["step"].min()),
        "last_step": int(steps["step"].max()),
        "steps": int(steps["step"].nunique()),
        "sampled_steps": len(sampled),
        "complete": view.complete,
        "problems": list(view.problems),
        "device": facts.get("device"),
        "versions": facts.get("versions"),
        "roots": [r.get("name") for r in facts.get("roots") or ()],
        **_applied_count(view),
        **facts_of_end(view),
        **({"steps_before": before} if before else {}),
        **({"cut_short": view.cut_short} if view.cut_short is not None else {}),
    }


def _applied_count(view: RunView) -> dict[str, Any]:
    """Return ``{"applied": N}`` if the run was recorded with N applied prescriptions, else an empty dictionary."""
    applied = view.run.info.get("applied")
    listed = applied.get("prescriptions") if isinstance(applied, Mapping) else None
    return {"applied": len(listed)} if isinstance(listed, list) else {}


def describe_recorder(view: RunView) -> dict[str, Any]:
    """Return what recording cost, the rows it dropped and its internal errors; ``changed_by`` (options that changed
    the training) and ``unseen`` (what could not be recorded) only if there are any.
    """
    changed_by = _changing_options(view.run.info.get("options"))
    unseen = sorted({str(e["data"].get("message")) for _, e in view.warnings_about("unseen")})
    return {
        **overhead(view),
        "dropped": dict(view.dropped),
        "errors": list(view.recorder_errors),
        **({"changed_by": changed_by} if changed_by else {}),
        **({"unseen": unseen} if unseen else {}),
    }


def _changing_options(options: object) -> list[str]:
    """Return the recording options in use that change the training: with them it is not bitwise what it would be."""
    known = options if isinstance(options, Mapping) else {}
    changing = {
        "--apply": bool(known.get("apply")),
        "--on-nonfinite skip": known.get("on_nonfinite") == "skip",
        "--compiled instrument": known.get("compiled") == "instrument",
    }
    return [flag for flag, used in changing.items() if used]


def _with_model(view: RunView, finding: Finding) -> Finding:
    """Append the model to the finding's title if the run has several models and the title does not name one.

    Otherwise `main.3` could be in either half of a GAN.
    """
    root = finding.location.root
    if root is None or len(view.models) < 2 or root not in view.models:
        return finding
    if not finding.location.module or root in finding.title:
        return finding
    return replace(finding, title=f"{finding.title} (in {root})")


def _with_process(view: RunView, finding: Finding) -> Finding:
    """Add the mesh coordinates of the rank to the finding's location; drop the attempt if the rank had only one."""
    rank, attempt = finding.location.rank, finding.location.attempt
    if rank is None:
        return finding
    if sum(p.rank == rank for p in view.everyone) < 2:
        attempt = None
    return replace(
        finding, location=replace(finding.location, attempt=attempt, coordinates=coordinates(view, rank) or None)
    )


def _with_own_steps(view: RunView, finding: Finding) -> Finding:
    """Add ``own_steps`` to the evidence if an optimizer's own count of the finding's steps differs from the run's.

    It differs if the run has several optimizers, or resumed a training whose optimizer counts its steps.
    """
    rank, attempt = finding.location.rank, finding.location.attempt
    mine = (p for p in view.timeline if rank in (None, p.rank) and attempt in (None, p.attempt))
    with_steps = [p for p in mine if view.timeline[p]]
    if not with_steps or (rank is not None and len(with_steps) > 1):  # it may be about any of them
        return finding
    steps, before = view.timeline[with_steps[0]], view.steps_before(with_steps[0])
    named_steps = [step for step in dict.fromkeys((finding.location.step, finding.resume_step)) if step is not None]
    own_counts = [(step, *own) for step in named_steps if (own := own_step(steps, step, before)) is not None]
    if not own_counts:
        return finding
    own_steps = [{"step": step, "optimizer": name, "number": number} for step, name, number in own_counts]
    return replace(finding, evidence={**finding.evidence, "own_steps": own_steps})
