"""PD507: a running average or statistic, or its count, that is written to in 16 bits and does not move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Severity, Status
from precdoctor.diagnosis.claims.relations import same_module, when, while_it_lasts
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule, RuleOption, RulePage, Triage
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import memory, percent, plural
from precdoctor.diagnosis.families.updates.stalled_average_buffers import Buffer, running_statistics, stalled_counts
from precdoctor.diagnosis.survey.frames import Ints, courses
from precdoctor.diagnosis.survey.parameters import HALF
from precdoctor.diagnosis.survey.rows import Parameter, dotted, tensor_location, text
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import format_of_dtype

PAGE = RulePage(
    finds="""
Averages of weights: weights in BF16 or FP16 that no gradient reaches and that the script writes to step after step (a
teacher, a target network, an exponential moving average). Not a bit of them changed in `min_writes` writes, while the
trained weight of the same name and shape went on changing. Weights without gradients are recorded only after a write,
so a frozen layer does not count, and neither does a copy that is made now and then.

Running statistics of a norm (`running_mean`, `running_var` in 16 bits): one of the two never changed a bit in
`min_writes` writes or more. The other one did, so averaging is switched on.

Counts: a 16-bit buffer of whole numbers that rose from write to write up to the value at which a sum of like terms
stalls (256 in BF16, 2048 in FP16, times the term), and has stayed there for `min_writes` writes.

All of it is one finding, which names one tensor and counts the others.
""",
    matters="""
An average moves by (1 - decay) of the distance to the weight. With a decay of 0.999 that is below half an ulp of BF16
unless the weight is three times as large as its average: the teacher stays what it was initialised to, and evaluation
on averaged weights is evaluation of the first step. Tensors whose elements differ in size still move in their smallest
elements and are not found here: one tensor that stands still is reported for all. Sums beside a count that has
stopped go on for a while, or in some elements, so mean and variance, the sums divided by the count, drift away from the
data. A batch norm trains on the statistics of each batch and shows nothing; evaluation uses the running ones.
""",
    example="""
    teacher = copy.deepcopy(student).bfloat16()
    for slow, fast in zip(teacher.parameters(), student.parameters()):
        slow.lerp_(fast.to(slow.dtype), 1 - 0.999)  # a norm's gain of 1.0 moves by 4e-3 or not at all
""",
    remedy="""
Keep the average in FP32 and cast it where it is used; it costs two more bytes per weight.
""",
    confidence="""
0.9: fingerprints show bit for bit that nothing changed, and that the script wrote to it. 0.75 when the average is of
one tensor only; 0.85 for a count, which the script could also have stopped there.
""",
    references=(
        "Tarvainen and Valpola, Mean teachers are better role models, arXiv:1703.01780",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192 (updates below half an ulp)",
    ),
)
_COLUMNS = ("dtype", "module_class", "shape", "numel", "fingerprint")
#: Trailing parts of its dotted name that an average must share with its weight: the parameter's, one of the module's.
_SHARED = 2


@dataclass(frozen=True)
class _Weight:
    """A weight; ``prints``: its fingerprint on each recorded step, ascending."""

    dtype: str
    module_class: str
    shape: tuple[int, ...]
    numel: int
    process: Process
    steps: Ints
    prints: npt.NDArray[Any]

    @property
    def moves(self) -> int:
        """Number of times that the fingerprint changed between two recorded steps."""
        return int(np.count_nonzero(self.prints[1:] != self.prints[:-1]))


def check(view: RunView, options: Options) -> Checked:
    """One finding over all tensors that stand still: averages of weights, running statistics, counts, in this order."""
    averages, counts = _averages(view, options), stalled_counts(view, options["min_writes"])
    statistics = running_statistics(view, options["min_writes"])
    still = {p: b for p, b in statistics.items() if not b.changes.size}
    found: list[tuple[str, Finding]] = [(averages.reason, f) for f in averages.findings]
    if still:
        seen = f"{len(still):,} of {plural(len(statistics), '16-bit running statistic')} never change"
        found.append((seen, _statistics_finding(still, options)))
    if counts:
        seen = f"{plural(len(counts), '16-bit count')} at the value where adding one stops"
        found.append((seen, _count_finding(counts, options)))
    if found:
        return Checked([_merged_finding([f for _, f in found])], "; ".join(seen for seen, _ in found))
    if statistics and averages.status is Status.NOT_APPLICABLE:
        return Checked((), f"{plural(len(statistics), '16-bit running statistic')}, and all of them move")
    return averages


def _merged_finding(findings: Sequence[Finding]) -> Finding:
    """The first finding, with the titles of the others in its message and their prescriptions behind its own."""
    first, *others = findings
    if not others:
        return first
    return replace(
        first,
        message=f"{first.message} In addition, {'; '.join(f.title for f in others)}.",
        evidence={**first.evidence, "also": [f.title for f in others]},
        prescriptions=[p for f in findings for p in f.prescriptions],
    )


def _averages(view: RunView, options: Options) -> Checked:
    """Check the averages of weights in BF16 or FP16."""
    weights = _survey(view)
    trained = view.places("weight_grad") | view.places("weight_grad_step")
    averages = {
        place: twin
        for place, w in weights.items()
        if place not in trained and w.dtype in HALF and w.steps.size > options["min_writes"]
        if (twin := _twin(place, w, {p: t for p, t in weights.items() if p in trained})) is not None
    }
    if not averages:
        return Checked.not_applicable("no write to an average of weights in BF16 or FP16 was recorded")
    seen = plural(len(averages), "16-bit average")
    stalled = {p: t for p, t in averages.items() if not weights[p].moves and weights[t].moves}
    if not stalled:
        return Checked((), f"{seen} of weights, and all of them move")
    finding = _finding(stalled, averages, weights, options)
    return Checked([finding], f"{len(stalled):,} of {seen} do not move")


def _survey(view: RunView) -> dict[Parameter, _Weight]:
    """Return all weights with fingerprints, each from the first process that recorded it."""
    frame = view.measured((), ("weight",), columns=_COLUMNS)
    frame = frame[frame["shape"].notna() & frame["fingerprint"].notna()]
    steps, prints = frame["step"].to_numpy(), frame["fingerprint"].to_numpy()
    return {
        place: _Weight(dtype, text(module_class), tuple(shape), numel, process, steps[own], prints[own])
        for place, process, (dtype, module_class, shape, numel), own in courses(frame, _COLUMNS[:-1])
    }


def _twin(place: Parameter, weight: _Weight, trained: Mapping[Parameter, _Weight]) -> Parameter | None:
    """Return the trained weight that an average follows: of the same shape, with the longest common end of the name.

    None if no name shares `_SHARED` parts.
    """
    own = _name_parts(place)
    best, most = None, _SHARED - 1
    for other, candidate in trained.items():
        shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(own, _name_parts(other), strict=False)))
        if candidate.shape == weight.shape and shared > most:
            best, most = other, shared
    return best


def _name_parts(place: Parameter) -> list[str]:
    """The parts of the full name, last part first."""
    return dotted(*place[1:]).split(".")[::-1]


def _and_more(places: Sized) -> str:
    """`` (and 3 more)``, for a title that names one of several tensors."""
    return f" (and {len(places) - 1:,} more)" if len(places) > 1 else ""


def _finding(
    stalled: Mapping[Parameter, Parameter],
    averages: Mapping[Parameter, Parameter],
    weights: Mapping[Parameter, _Weight],
    options: Options,
) -> Finding:
    place = max(stalled, key=lambda p: weights[p].steps.size)
    weight, twin = weights[place], stalled[place]
    half_ulp = format_of_dtype(weight.dtype).ulp_at_one / 2.0
    writes = weight.steps.size - 1
    elements = sum(weights[p].numel for p in averages)
    share = len(stalled) / len(averages)
    message = (
        f"`{dotted(*place[1:])}` is {weight.dtype} and was written to on {plural(writes, 'recorded step')} (limit "
        f"{options['min_writes']:g}) without changing a bit, while `{dotted(*twin[1:])}`, of the same shape, changed "
        f"{plural(weights[twin].moves, 'time')}: each addend is below half an ulp, {half_ulp:.2g} of an element. "
        f"{len(stalled):,} of {plural(len(averages), 'averaged tensor')} stand still."
    )
    return RULE.finding(
        confidence=0.9 if len(averages) > 1 else 0.75,
        title=f"the average `{dotted(*place[1:])}`{_and_more(stalled)} is written to and never moves in {weight.dtype}",
        message=message,
        location=tensor_location(
            place, weight.module_class, "weight", Phase.OPTIMIZER, weight.process, int(weight.steps[-1])
        ),
        evidence={
            "writes": writes,
            "limit": options["min_writes"],
            "stalled_share": share,
            "half_ulp": half_ulp,
            "averages": [{"average": dotted(*p[1:]), "follows": dotted(*t[1:])} for p, t in list(stalled.items())[:16]],
            "confidence_reason": "fingerprints are equal bit for bit, and the weights were written to",
        },
        prescription=Prescription(
            title=f"keep the average in FP32: averages that stand still {percent(share)} -> 0 %, "
            f"+{memory(2 * elements)}",
            change={"average_dtype": {"from": weight.dtype, "to": "float32"}},
            predicted={"stalled_share": {"from": share, "to": 0.0}, "extra_bytes": 2 * elements},
            snippet=(
                f"average = {module_expression(place[1])}.float()  # once, before training\n"
                "for slow, fast in zip(average.parameters(), student.parameters()):\n"
                "    slow.lerp_(fast.float(), 1 - decay)\n"
            ),
        ),
    )


def _statistics_finding(stalled: Mapping[Parameter, Buffer], options: Options) -> Finding:
    place, buffer = max(stalled.items(), key=lambda item: (item[1].steps.size, item[0]))
    label, extra = dotted(*place[1:]), 2 * sum(b.numel for b in stalled.values())
    half_ulp = format_of_dtype(buffer.dtype).ulp_at_one / 2.0
    writes = buffer.steps.size - 1
    message = (
        f"`{label}` is {buffer.dtype}, at most {buffer.value:.3g}, and was written to on "
        f"{plural(writes, 'recorded step')} (limit {options['min_writes']:g}) without changing a bit, while its "
        "partner in the same norm moved: momentum times the distance from the batch's statistic is below half an ulp, "
        f"{half_ulp:.2g} of an element. Evaluation will use its first value. "
        f"{plural(len(stalled), 'running statistic')} in all."
    )
    return RULE.finding(
        confidence=0.9,
        title=f"the running statistic `{label}`{_and_more(stalled)} is written to and never moves in {buffer.dtype}",
        message=message,
        location=tensor_location(
            place, buffer.module_class, "buffer", Phase.FORWARD, buffer.process, int(buffer.steps[-1])
        ),
        evidence={
            "writes": writes,
            "limit": options["min_writes"],
            "half_ulp": half_ulp,
            "statistics": [dotted(*p[1:]) for p in stalled][:16],
            "confidence_reason": "fingerprints are equal bit for bit, and the partner in the same norm changed",
        },
        prescription=Prescription(
            title=f"this norm in FP32: half an ulp {half_ulp:.2g} -> {2.0**-24:.2g}, +{memory(extra)}",
            change={"module": place[1], "buffer_dtype": {"from": buffer.dtype, "to": "float32"}},
            predicted={"half_ulp": {"from": half_ulp, "to": 2.0**-24}, "extra_bytes": extra},
            snippet=f"{module_expression(place[1])}.float()  # once, before training; its input may stay narrow\n",
        ),
    )


def _count_finding(counts: Mapping[Parameter, Buffer], options: Options) -> Finding:
    place, count = max(counts.items(), key=lambda item: item[1].idle)
    label, extra = dotted(*place[1:]), 2 * sum(b.numel for b in counts.values())
    ulp = 2.0 ** math.floor(math.log2(count.value)) * format_of_dtype(count.dtype).ulp_at_one
    message = (
        f"`{label}` is {count.dtype}, rose from write to write up to {count.value:,g} at step {count.last_change}, and "
        f"has been written to on {plural(count.idle, 'recorded step')} since (limit {options['min_writes']:g}) without "
        f"changing a bit: neighbours in {count.dtype} are {ulp:g} apart there, and half of that is rounded away. "
        f"Quotients of this count are wrong from step {count.last_change} on, and sums beside it stall later."
    )
    return RULE.finding(
        confidence=0.85,
        title=f"the count `{label}`{_and_more(counts)} stops at {count.value:,g}, where adding one is lost in "
        f"{count.dtype}",
        message=message,
        location=tensor_location(place, count.module_class, "buffer", Phase.FORWARD, count.process, count.last_change),
        evidence={
            "writes": count.idle,
            "limit": options["min_writes"],
            "stalls_at": count.value,
            "ulp": ulp,
            "last_bad_step": int(count.steps[-1]),
            "counts": [dotted(*p[1:]) for p in counts][:16],
            "confidence_reason": "it stays, bit for bit, where a sum of ones stalls; the script could have stopped it",
        },
        prescription=Prescription(
            title=f"counts and sums in FP32: stalls at {count.value:,g} -> {2**24:,}, +{memory(extra)}",
            change={"buffer_dtype": {"from": count.dtype, "to": "float32"}},
            predicted={"stalls_at": {"from": count.value, "to": 2.0**24}, "extra_bytes": extra},
            snippet=(
                f"statistics = {module_expression(place[1])}\n"
                "for name, buffer in statistics.named_buffers(recurse=False):\n"
                "    setattr(statistics, name, buffer.float())  # once, before training\n"
            ),
        ),
    )


RULE = Rule(
    code="PD507",
    name="stalled-average",
    severity=Severity.WARNING,
    triage=Triage.OPTIMIZER,
    page=PAGE,
    options=(
        RuleOption("min_writes", 6.0, "recorded steps", "Least number of writes by which an average must have moved.",
                   "Chosen empirically: a weight that is at rest for one step is not at rest for six.", 1.0),
    ),
    explains={**when(while_it_lasts, "PD605"), **when(same_module, "PD701")},
    check=check,
)  # fmt: skip
