"""PD509 without a scan: an average of weights, a running statistic or a count whose fingerprint never changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from precdoctor.diagnosis.analyses.parameters import HALF
from precdoctor.diagnosis.claims.finding import Finding, Phase, Prescription, Status
from precdoctor.diagnosis.claims.rule import Checked, Options, Rule
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import and_more, memory, percent, plural
from precdoctor.diagnosis.survey.frames import Ints, courses, finite
from precdoctor.diagnosis.survey.measures import Floats, column
from precdoctor.diagnosis.survey.rows import Parameter, dotted, known_format, tensor_location, text
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import format_of_dtype

_COLUMNS = ("dtype", "module_class", "numel", "shape", "fingerprint")
_BUFFER_COLUMNS = ("module_class", "dtype", "numel", "nan", "pos_inf", "neg_inf", "amax", "sum", "amin_nonzero",
                   "fingerprint")  # fmt: skip
#: Running statistics of torch's norms, each with its partner in the same norm.
_PARTNER = {"running_var": "running_mean", "running_mean": "running_var"}
#: Trailing parts of its dotted name that an average must share with its weight: the parameter's, one of the module's.
_SHARED = 2


@dataclass(frozen=True)
class _Written:
    """A tensor that the script writes to, on the recorded steps, ascending; ``prints``: its fingerprint on each."""

    dtype: str
    module_class: str
    numel: int
    process: Process
    steps: Ints
    prints: npt.NDArray[Any]

    @property
    def writes(self) -> int:
        """Number of recorded writes."""
        return int(self.steps.size) - 1

    @property
    def changes(self) -> Ints:
        """Indices into ``steps`` of the writes that changed a bit."""
        return np.flatnonzero(self.prints[1:] != self.prints[:-1]) + 1

    @property
    def half_ulp(self) -> float:
        """Half an ulp at 1."""
        return format_of_dtype(self.dtype).ulp_at_one / 2.0


@dataclass(frozen=True)
class _Weight(_Written):
    """A weight."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Buffer(_Written):
    """A 16-bit buffer on the steps before which the script had written to it.

    Attributes:
        mean, amax: mean and largest magnitude on each step.
        counts: whether all elements are equal whole numbers, as in a count, on every step.
    """

    mean: Floats
    amax: Floats
    counts: bool

    @property
    def value(self) -> float:
        """Largest magnitude on the last step."""
        return float(self.amax[-1])

    @property
    def idle(self) -> int:
        """Number of recorded writes since the last one that changed a bit."""
        return int(self.steps.size - 1 - self.changes.max(initial=0))

    @property
    def last_change(self) -> int:
        """Step of the last write that changed a bit; the first step if none did."""
        return int(self.steps[-1 - self.idle])

    def is_swamped_count(self) -> bool:
        """Return whether the count rose with every write until half an ulp was one term, and stays there.

        A sum of ones stalls at 2^(m+1), m the stored bits of the significand: 256 in BF16, 2048 in FP16; a sum of terms
        d at d times as much. Several additions between two recorded steps look like one larger rise, so both one and
        the smallest rise are tried as the term.
        """
        fmt = known_format(self.dtype)
        rises = np.diff(self.mean[: self.steps.size - self.idle])
        if fmt is None or rises.size < 2 or rises.min() <= 0.0 or not self.counts:
            return False
        stalls = 2.0 ** (fmt.mantissa_bits + 1)
        return self.value in (stalls, stalls * rises.min())


def unchanged_prints(rule: Rule, view: RunView, options: Options) -> Checked:
    """One finding over all tensors that stand still: averages of weights, running statistics, counts, in this order."""
    averages, buffers = _averages(rule, view, options), _buffers(view)
    counts = {p: b for p, b in buffers.items() if b.idle >= options["min_writes"] and b.is_swamped_count()}
    statistics = _running_statistics(buffers, options["min_writes"])
    still = {p: b for p, b in statistics.items() if not b.changes.size}
    found: list[tuple[str, Finding]] = [(averages.reason, f) for f in averages.findings]
    if still:
        seen = f"{len(still):,} of {plural(len(statistics), '16-bit running statistic')} never change"
        found.append((seen, _statistics_finding(rule, still, options)))
    if counts:
        seen = f"{plural(len(counts), '16-bit count')} at the value where adding one stops"
        found.append((seen, _count_finding(rule, counts, options)))
    if found:
        return Checked([merged_finding([f for _, f in found])], "; ".join(seen for seen, _ in found))
    if statistics and averages.status is Status.NOT_APPLICABLE:
        return Checked((), f"{plural(len(statistics), '16-bit running statistic')}, and all of them move")
    return averages


def merged_finding(findings: Sequence[Finding]) -> Finding:
    """The first finding, with the titles of the others in its message and their prescriptions behind its own."""
    first, *others = findings
    if not others:
        return first
    last = [f.evidence["last_bad_step"] for f in others if "last_bad_step" in f.evidence]
    until = {"last_bad_step": max(last)} if last else {}
    return replace(
        first,
        message=f"{first.message} In addition, {'; '.join(f.title for f in others)}.",
        evidence={**until, **first.evidence, "also": [f.title for f in others]},
        prescriptions=[p for f in findings for p in f.prescriptions],
    )


def _averages(rule: Rule, view: RunView, options: Options) -> Checked:
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
    stalled = {p: t for p, t in averages.items() if not weights[p].changes.size and weights[t].changes.size}
    if not stalled:
        return Checked((), f"{seen} of weights, and all of them move")
    finding = _average_finding(rule, stalled, averages, weights, options)
    return Checked([finding], f"{len(stalled):,} of {seen} do not move")


def _survey(view: RunView) -> dict[Parameter, _Weight]:
    """Return all weights with fingerprints, each from the first process that recorded it."""
    frame = view.measured((), ("weight",), columns=_COLUMNS)
    frame = frame[frame["shape"].notna() & frame["fingerprint"].notna()]
    steps, prints = frame["step"].to_numpy(), frame["fingerprint"].to_numpy()
    return {
        place: _Weight(dtype, text(module_class), numel, process, steps[own], prints[own], tuple(shape))
        for place, process, (dtype, module_class, numel, shape), own in courses(frame, _COLUMNS[:-1])
    }


def _running_statistics(buffers: Mapping[Parameter, _Buffer], min_writes: float) -> Mapping[Parameter, _Buffer]:
    """Return running means and variances with ``min_writes`` writes or more whose partner in the same norm changes.

    With a momentum of 0, or in evaluation, neither of the two would change.
    """
    found = {}
    for (root, module, name), buffer in buffers.items():
        partner = buffers.get((root, module, _PARTNER.get(name, "")))
        if partner is not None and partner.changes.size and buffer.steps.size > min_writes:
            found[root, module, name] = buffer
    return found


def _buffers(view: RunView) -> dict[Parameter, _Buffer]:
    """Return all 16-bit buffers with fingerprints and finite elements, each from the first process that recorded it."""
    frame = view.measured((), ("buffer",), columns=_BUFFER_COLUMNS, where=[("dtype", "in", HALF)])
    frame = frame[finite(frame) & frame[["fingerprint", "sum", "amax"]].notna().all(axis=1)]
    steps, prints, amax = (frame[c].to_numpy() for c in ("step", "fingerprint", "amax"))
    mean = column(frame, "sum") / np.maximum(column(frame, "numel"), 1.0)
    equal = (amax == 0.0) | (column(frame, "amin_nonzero") == amax)
    counts = equal & (amax == np.trunc(amax))
    return {
        place: _Buffer(dtype, text(module_class), max(1, numel), process, steps[own], prints[own], mean[own], amax[own],
                      bool(counts[own].all()))
        for place, process, (dtype, module_class, numel), own in courses(frame, ("dtype", "module_class", "numel"))
    }  # fmt: skip


def _twin(place: Parameter, weight: _Weight, trained: Mapping[Parameter, _Weight]) -> Parameter | None:
    """Return the trained weight that an average follows: of the same shape, with the longest common end of the name.

    None if no name shares `_SHARED` parts.
    """
    shared = {other: _shared_parts(place, other) for other, t in trained.items() if t.shape == weight.shape}
    best = max(shared, key=shared.__getitem__, default=None)
    return best if best is not None and shared[best] >= _SHARED else None


def _shared_parts(place: Parameter, other: Parameter) -> int:
    """Number of parts at the end of their full names that two weights share."""
    own, others = (dotted(*p[1:]).split(".")[::-1] for p in (place, other))
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(own, others, strict=False)))


def _average_finding(
    rule: Rule,
    stalled: Mapping[Parameter, Parameter],
    averages: Mapping[Parameter, Parameter],
    weights: Mapping[Parameter, _Weight],
    options: Options,
) -> Finding:
    place = max(stalled, key=lambda p: weights[p].steps.size)
    weight, twin = weights[place], stalled[place]
    elements = sum(weights[p].numel for p in averages)
    share = len(stalled) / len(averages)
    label, follows = dotted(*place[1:]), dotted(*twin[1:])
    if place[0] != twin[0]:  # a copy of the model, so that the names are the same
        label, follows = (".".join((p[0], *filter(None, p[1:]))) for p in (place, twin))
    return rule.finding(
        confidence=0.9 if len(averages) > 1 else 0.75,
        title=f"the average `{label}`{and_more(len(stalled))} is written to and never moves in {weight.dtype}",
        message=f"`{label}` is {weight.dtype} and was written to on "
        f"{plural(weight.writes, 'recorded step')} (limit {options['min_writes']:g}) without changing a bit, while "
        f"`{follows}`, of the same shape, changed {plural(weights[twin].changes.size, 'time')}: each addend "
        f"is below half an ulp, {weight.half_ulp:.2g} of an element. {len(stalled):,} of "
        f"{plural(len(averages), 'averaged tensor')} stand still.",
        location=tensor_location(
            place, weight.module_class, "weight", Phase.OPTIMIZER, weight.process, int(weight.steps[-1])
        ),
        evidence={
            "writes": weight.writes,
            "limit": options["min_writes"],
            "stalled_share": share,
            "half_ulp": weight.half_ulp,
            "averages": [{"average": dotted(*p[1:]), "follows": dotted(*t[1:])} for p, t in list(stalled.items())[:16]],
            "confidence_reason": "fingerprints are equal bit for bit, and the weights were written to",
        },
        prescription=Prescription(
            title=f"keep the average in FP32: averages that stand still {percent(share)} -> 0 %, "
            f"+{memory(2 * elements)}",
            change={"average_dtype": {"from": weight.dtype, "to": "float32"}},
            predicted={"stalled_share": {"from": share, "to": 0.0}, "extra_bytes": 2 * elements},
            snippet=_average_in_float32(place, twin),
        ),
    )


def _average_in_float32(place: Parameter, twin: Parameter) -> str:
    """Return lines that keep an average in FP32; both modules are cut off before the names that they share."""
    shared = _shared_parts(place, twin)
    average, student = (".".join(dotted(*p[1:]).split(".")[:-shared]) for p in (place, twin))
    if place[0] == twin[0]:
        slow, model = module_expression(average), module_expression(student)
        made = f"{slow}.float()  # once, before training\n"
    else:
        slow, model = "average", module_expression(student)
        made = f"average = average.float()  # `{place[0]}`, once, before training\n"
    return (
        f"{made}for slow, fast in zip({slow}.parameters(), {model}.parameters()):\n"
        "    slow.lerp_(fast.float(), 1 - decay)\n"
    )


def _statistics_finding(rule: Rule, stalled: Mapping[Parameter, _Buffer], options: Options) -> Finding:
    place, buffer = max(stalled.items(), key=lambda item: (item[1].steps.size, item[0]))
    label, extra = dotted(*place[1:]), 2 * sum(b.numel for b in stalled.values())
    return rule.finding(
        confidence=0.9,
        title=f"the running statistic `{label}`{and_more(len(stalled))} is written to and never moves in "
        f"{buffer.dtype}",
        message=f"`{label}` is {buffer.dtype}, at most {buffer.value:.3g}, and was written to on "
        f"{plural(buffer.writes, 'recorded step')} (limit {options['min_writes']:g}) without changing a bit, while its "
        "partner in the same norm moved: momentum times the distance from the batch's statistic is below half an ulp, "
        f"{buffer.half_ulp:.2g} of an element. Evaluation will use its first value. "
        f"{plural(len(stalled), 'running statistic')} in all.",
        location=tensor_location(
            place, buffer.module_class, "buffer", Phase.FORWARD, buffer.process, int(buffer.steps[-1])
        ),
        evidence={
            "writes": buffer.writes,
            "limit": options["min_writes"],
            "half_ulp": buffer.half_ulp,
            "statistics": [dotted(*p[1:]) for p in stalled][:16],
            "confidence_reason": "fingerprints are equal bit for bit, and the partner in the same norm changed",
        },
        prescription=Prescription(
            title=f"this norm in FP32: half an ulp {buffer.half_ulp:.2g} -> {2.0**-24:.2g}, +{memory(extra)}",
            change={"module": place[1], "buffer_dtype": {"from": buffer.dtype, "to": "float32"}},
            predicted={"half_ulp": {"from": buffer.half_ulp, "to": 2.0**-24}, "extra_bytes": extra},
            snippet=f"{module_expression(place[1])}.float()  # once, before training; its input may stay narrow\n",
        ),
    )


def _count_finding(rule: Rule, counts: Mapping[Parameter, _Buffer], options: Options) -> Finding:
    place, count = max(counts.items(), key=lambda item: item[1].idle)
    label, extra = dotted(*place[1:]), 2 * sum(b.numel for b in counts.values())
    ulp = 2.0 ** math.floor(math.log2(count.value)) * format_of_dtype(count.dtype).ulp_at_one
    return rule.finding(
        confidence=0.85,
        title=f"the count `{label}`{and_more(len(counts))} stops at {count.value:,g}, where adding one is lost in "
        f"{count.dtype}",
        message=f"`{label}` is {count.dtype}, rose from write to write up to {count.value:,g} at step "
        f"{count.last_change}, and has been written to on {plural(count.idle, 'recorded step')} since (limit "
        f"{options['min_writes']:g}) without changing a bit: neighbours in {count.dtype} are {ulp:g} apart there, and "
        f"half of that is rounded away. Quotients of this count are wrong from step {count.last_change} on, and sums "
        "beside it stall later.",
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
