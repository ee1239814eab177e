"""PD108: non-finite values that the same inputs, weights and random state do not give a second time."""

from __future__ import annotations

import math

from precdoctor.diagnosis.claims.finding import Finding, Prescription, Severity, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.incident_report import evidence_of, location_of, resume_advice
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident, incidents
from precdoctor.diagnosis.survey.op_facts import Examined, examined_at
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS
from precdoctor.diagnosis.survey.view import Process, RunView

PAGE = RulePage(
    finds="""
A forward pass that gave a NaN or an infinity, and did not when it was run again at once with the same arguments,
weights, buffers and random state; while on the recorded step before every activation stayed `headroom` binades or more
below the end of its format, so that no number was anywhere near to running over. Arguments that the script had changed
in place by then, and modules whose attributes the second pass changed, are a reason for another result and do not
count. On several ranks it is said whether the others were finite.
""",
    matters="""
Precision is deterministic: the same operands overflow again. What comes and goes is memory that was read before it was
written, two streams without an event between them, a kernel with a race, an unfinished collective, a device that is
about to fail. No loss scale and no wider format cures it, and looking for one costs days.
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
0.7; 0.8 when other ranks were finite at the same step. Python state outside the modules, such as a counter, can make a
second pass differ, too, and cannot be seen.
""",
    references=(
        "PyTorch documentation: CUDA semantics, streams; Reproducibility",
        "Dixit et al., Silent Data Corruptions at Scale, arXiv:2102.11245",
    ),
)


def check(view: RunView, options: Options) -> Checked:
    """One finding: the first such incident."""
    seen = [(i, e) for i in incidents(view) if (e := examined_at(view, i.process, i.step)) is not None]
    if not incidents(view):
        return Checked((), "no step went wrong")
    if not seen:
        return Checked.not_applicable("no step that went wrong was run again")
    words = f"{plural(len(seen), 'step')} run again because of a non-finite value"
    for incident, examined in seen:
        room = _least_headroom(view, incident.process, incident.step)
        if _came_and_went(examined) and room is not None and room >= options["headroom"]:
            finding = _finding(view, incident, examined, room, options)
            return Checked([finding], f"not reproduced: one of {words}", Status.FAILED)
    return Checked((), f"{words}, with the same result or for a reason that is known")


def _came_and_went(examined: Examined) -> bool:
    changed = examined.changed_arguments or examined.changed_attributes
    return examined.outcome == "not-reproduced" and not examined.live and not changed


def _least_headroom(view: RunView, process: Process, step: int) -> float | None:
    """Binades between the largest activation of the last recorded step before and its format's end."""
    before = [s.step for s in view.timeline.get(process, ()) if s.sampled and s.step < step]
    rows = view.rows(process, before[-1]) if before else ()
    rooms = [r.headroom for r in rows if r.kind in FORWARD_KINDS and not r.bad]
    return min((room for room in rooms if room is not None and math.isfinite(room)), default=None)


def _others_finite(view: RunView, incident: Incident) -> int:
    """How many other ranks had a finite loss at that step."""
    count = 0
    for process in view.processes:
        facts = view.step_facts(process, incident.step)
        if process.rank != incident.process.rank and facts is not None and facts.loss is not None:
            count += math.isfinite(facts.loss) and not facts.loss_is_bad
    return count


def _finding(view: RunView, incident: Incident, examined: Examined, room: float, options: Options) -> Finding:
    place = location_of(incident)
    others = _others_finite(view, incident)
    where = f"`{place.module or place.root}`" if place.root else "the model"
    message = (
        f"Step {incident.step} went wrong in {where}: {examined.why}. Run again with the same arguments, weights and "
        f"random state it was finite. One recorded step earlier no activation was nearer than {room:.1f} binades to "
        f"the end of its format (limit {options['headroom']:g}), so this is not a matter of range. "
    )
    if others:
        message += (
            f"{plural(others, 'other rank')} had a finite loss at that step: suspect rank {place.rank}'s device. "
        )
    return Finding(
        code="PD108",
        name="irreproducible-nonfinite",
        severity=Severity.ERROR,
        confidence=0.8 if others else 0.7,
        title=f"step {incident.step} is non-finite once and finite when run again: not a matter of precision",
        message=message + resume_advice(incident),
        location=place,
        evidence={
            **evidence_of(view, incident),
            "headroom_binades_before": room,
            "limit": options["headroom"],
            "finite_ranks": others,
            "confidence_reason": "the step was run again from the same state and was finite",
        },
        prescriptions=(
            Prescription(
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
            "headroom",
            4.0,
            "binades",
            "Least distance of every activation from the end of its format on the recorded step before.",
            "Precdoctor's own: amax varies by a factor of two between batches, and 16 is beyond that.",
        ),
    ),
    kinds=(),
    columns=("amax",),
    check=check,
)
