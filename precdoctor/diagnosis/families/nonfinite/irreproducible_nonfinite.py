"""PD108: non-finite values that a replay with the same inputs, weights and random state does not reproduce."""

from __future__ import annotations

import math

from precdoctor.diagnosis.analyses.op_facts import Replay
from precdoctor.diagnosis.analyses.replays import replay_at
from precdoctor.diagnosis.analyses.replicas import coordinates
from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity, rank_place
from precdoctor.diagnosis.claims.relations import when, while_it_lasts
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.incident import Incident
from precdoctor.diagnosis.families.nonfinite.incident_report import evidence_of, location_of
from precdoctor.diagnosis.families.nonfinite.incident_search import incidents
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A forward pass that gave a NaN or an infinity, while its immediate replay with the same arguments, weights, buffers and
random state was finite. On the recorded step before, every activation must have stayed `headroom` binades or more below
the end of its format, so that no number was near an overflow. Replays do not count if the script had changed an
argument in place by then, or if the replay changed attributes of a module: both explain another result. With several
ranks the finding says whether the others were finite. Where no kernel may give two results, because the run is on a CPU
or torch's deterministic algorithms are on, the finding names the device as a suspect.
""",
    matters="""
Precision is deterministic: the same operands overflow again. A value that comes and goes points to memory read before
it was written, two streams without an event between them, a kernel with a race, an unfinished collective, or a failing
device. No loss scale and no wider format cures that, and a search for one costs days.
""",
    example="""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch = batch.to("cuda", non_blocking=True)
    loss = model(batch)  # no wait_stream: reads what may not have arrived
""",
    remedy="""
Run the step again from a checkpoint: if it is finite, run with `CUDA_LAUNCH_BLOCKING=1`, and look for
`torch.empty`, custom kernels, side streams and in-place writes to tensors in flight. If it is always the same rank,
change the device.
""",
    confidence="""
0.7; 0.8 if other ranks were finite at the same step. Python state outside the modules, such as a counter, can also make
a replay differ; the recorder does not see it. The suspicion against the device has a confidence of its own: 0.5 if
other ranks were finite, else 0.3, because memory that is read before it was written looks the same.
""",
    references=(
        "PyTorch documentation: CUDA semantics, streams; Reproducibility",
        "Dixit et al., Silent Data Corruptions at Scale, arXiv:2102.11245",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the first incident whose replay was finite without a known reason."""
    if not incidents(view):
        return Checked((), "no step became non-finite")
    replayed = [(i, r) for i in incidents(view) if (r := replay_at(view, i.process, i.step)) is not None]
    if not replayed:
        return Checked.not_applicable("no non-finite step was replayed")
    words = plural(len(replayed), "replayed step")
    for incident, replay in replayed:
        headroom = _least_headroom(view, incident.process, incident.step)
        if _not_reproduced(replay) and headroom is not None and headroom >= options["headroom"]:
            return Checked([_finding(view, incident, replay, headroom, options)], f"one of {words} was finite")
    return Checked((), f"{words}, non-finite again or finite for a known reason")


def _not_reproduced(replay: Replay) -> bool:
    """Whether the replay was finite, and neither a changed argument nor a changed attribute explains that."""
    changed = replay.changed_arguments or replay.changed_attributes
    return replay.outcome == "not-reproduced" and not replay.live and not changed


def _least_headroom(view: RunView, process: Process, step: int) -> float | None:
    """Smallest headroom of an activation on the last sampled step before ``step``, in binades; None if unknown."""
    before = [s.step for s in view.timeline.get(process, ()) if s.sampled and s.step < step]
    rows = view.rows(process, before[-1]) if before else ()
    headrooms = [r.headroom for r in rows if r.kind in FORWARD_KINDS and not r.bad]
    return min((headroom for headroom in headrooms if headroom is not None and math.isfinite(headroom)), default=None)


def _others_finite(view: RunView, incident: Incident) -> int:
    others = (view.step_facts(p, incident.step) for p in view.processes if p.rank != incident.process.rank)
    return sum(f is not None and f.loss is not None and not f.loss_is_bad for f in others)


def _allows_two_results(view: RunView, process: Process) -> bool:
    """Whether kernels may give different bits for the same operands: off the CPU, unless determinism is enforced."""
    facts = view.facts(process)
    flags, device = facts.get("flags") or {}, facts.get("device") or {}
    deterministic = flags.get("deterministic_algorithms") is True and not flags.get("deterministic_warn_only")
    return device.get("type") != "cpu" and not deterministic


def _device_words(rank: str, others: int, *, suspected: bool) -> str:
    """Sentences on the ``others``, ranks with a finite loss, and on whether the rank's device is a suspect."""
    finite = f"{plural(others, 'other rank')} had a finite loss at that step. " if others else ""
    if not suspected:
        words = f"If it stays with {rank}, suspect its device. " if others else ""
        return f"{finite}Kernels of this run may give other bits each time. {words}"
    return (
        f"{finite}No kernel of this run may give two results for the same operands. That leaves memory that was read "
        f"before it was written, and the device of {rank} as a suspect. "
    )


def _finding(view: RunView, incident: Incident, replay: Replay, room: float, options: Options) -> Finding:
    place = location_of(incident)
    others = _others_finite(view, incident)
    where = f"`{place.module or place.root}`" if place.root else "the model"
    message = (
        f"Step {incident.step} became non-finite in {where}: {replay.why}. Its replay with the same arguments, weights "
        f"and random state was finite. On the recorded step before, every activation was at least {room:.1f} binades "
        f"below the end of its format (limit {options['headroom']:g}), so this is not a matter of range. "
    )
    suspected = not _allows_two_results(view, incident.process)
    rank = rank_place(incident.process.rank, coordinates(view, incident.process.rank))
    message += _device_words(rank, others, suspected=suspected)
    return RULE.finding(
        confidence=0.8 if others else 0.7,
        title=f"step {incident.step} is non-finite, its replay is finite: not a matter of precision",
        message=message + incident.resume_advice,
        location=place,
        evidence={
            **evidence_of(view, incident),
            "headroom_binades_before": room,
            "limit": options["headroom"],
            "finite_ranks": others,
            "suspected_device_of_rank": incident.process.rank if suspected else None,
            "suspected_device_confidence": (0.5 if others else 0.3) if suspected else None,
            "confidence_reason": "the replay of the step from the same state was finite",
        },
        prescription=Prescription(
            title=f"run again from before step {incident.step} with kernels one after the other; expected finite",
            change={"environment": {"CUDA_LAUNCH_BLOCKING": "1"}},
            predicted={"nonfinite_steps": {"from": incident.bad_steps, "to": 0}},
            snippet=(
                "import os\n\n"
                'os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # before torch is imported\n'
                "import torch\n\n"
                "torch.utils.deterministic.fill_uninitialized_memory = True\n"
                "torch.use_deterministic_algorithms(True)  # empty tensors hold NaN: reading one shows at once\n"
            ),
        ),
    )


RULE = Rule(
    code="PD108",
    name="irreproducible-nonfinite",
    severity=Severity.ERROR,
    triage=Triage.FORWARD,
    page=PAGE,
    options=(
        RuleOption(
            "headroom", 4.0, "binades", "Least headroom of every activation on the recorded step before.",
            "Chosen empirically: amax varies by a factor of two between batches, and 16 is beyond that.",
        ),
    ),
    sampled_steps=False,
    explains=when(while_it_lasts, "PD101", "PD102", "PD103", "PD105", "PD106", "PD605"),
    check=check,
)  # fmt: skip
