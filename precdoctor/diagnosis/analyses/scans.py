"""Deep scans of healthy steps: the facts in the ``scan`` events, and the check that all rules on scan facts share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from precdoctor.diagnosis.analyses.op_facts import caller_of, real
from precdoctor.diagnosis.claims import finding as claims
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Source, at_line
from precdoctor.diagnosis.claims.rule import Checked, Rule
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.survey.processes import Process
from precdoctor.diagnosis.survey.rows import dotted, grouped, integer, source_of, text
from precdoctor.diagnosis.survey.view import RunView, remembered

#: Most places in the code that a rule reports, and most modules listed for each: a reader needs no more.
_MAX_PLACES, _MAX_MODULES = 8, 16
#: Highest confidence if a single scanned step shows the fact; if its effect was not measured. Chosen empirically.
_ONE_STEP, _NOT_FOLLOWED = 0.7, 0.7
#: Words for the evidence that triggered a scan, by its ``what``.
_EVIDENCE = {
    "zeros": "share of zeros",
    "squares": "amax, whose square leaves its format,",
    "headroom": "amax, less than one binade below the maximum,",
    "loss-scale": "loss scale",
    "learning-rate": "learning rate",
    "grad-norm": "gradient norm",
    "clipped-norm": "norm of clipped FP16 gradients, beyond FP16,",
    "discarded": "two discarded steps in a row",
    "fact": "what one scan alone had found",
}

#: Words for the place of an op outside modules, by the phase of its fact.
_STAGES = {
    "backward": "the backward pass",
    "loss": "the loss code",
    "optimizer": "the code after the backward pass",
    "script": "the code between two steps",
}
_PHASES = {"backward": Phase.BACKWARD, "loss": Phase.LOSS, "optimizer": Phase.OPTIMIZER, "script": Phase.OPTIMIZER}


@dataclass(frozen=True)
class Scan:
    """A deep scan of one step of one process.

    Attributes:
        outcome: done | refused | dropped.
        why: the recorder's reason if the scan was not done.
        ops: number of scanned ops.
        reason: first | spaced | evidence; empty in logs of older recorders.
        evidence: recorded numbers that triggered the scan, in words.
        found: number of facts that the scan recorded.
    """

    step: int
    process: Process
    outcome: str
    why: str
    ops: int
    reason: str = ""
    evidence: tuple[str, ...] = ()
    found: int = 0


@dataclass(frozen=True)
class Fact:
    """A defect that a deep scan measured on one op; ``data`` holds its numbers by the fact's ``kind``."""

    kind: str
    step: int
    process: Process
    root: str
    module: str
    op: str
    source: Source | None
    data: Mapping[str, Any] = field(default_factory=dict)
    in_library: bool = False  # whether ``source`` is in an installed package

    @property
    def short(self) -> str:
        """``mul`` of ``aten.mul_.Tensor``."""
        return short_name(self.op)

    @property
    def phase(self) -> str:
        """The phase in which the op ran: script, forward, loss, backward, optimizer."""
        return text(self.data.get("phase"))

    @property
    def backward(self) -> bool:
        """Whether the op ran in the backward pass."""
        return self.phase == "backward"

    @property
    def dtype(self) -> str:
        """The dtype of the op's first result; empty if unknown."""
        results = self.data.get("results")
        first = results[0] if isinstance(results, list) and results else None
        return text(first.get("dtype")) if isinstance(first, Mapping) else ""

    @property
    def line(self) -> str:
        """`` at train.py:42``; empty if the line is unknown."""
        return at_line(self.source)

    @property
    def own_line(self) -> str:
        """The place for a change: :attr:`line`, or `` around the call at train.py:17`` if that is in a library."""
        return claims.change_line(self.source, caller_of(self.data), in_library=self.in_library)

    @property
    def place_words(self) -> str:
        """``in `blocks.3.attn```, or ``in the loss code`` for an op outside modules."""
        return f"in `{self.module or self.root}`" if self.root else f"in {_STAGES.get(self.phase, _STAGES['backward'])}"

    @property
    def op_words(self) -> str:
        """``At step 12, aten.mul.Tensor at train.py:42 in `blocks.3.attn```."""
        return f"At step {self.step}, {self.op}{self.line} {self.place_words}"

    @property
    def owner(self) -> tuple[str, str]:
        """Root and module of the op; of an op outside modules those of the parameter (or its state) that it writes."""
        owner = self.data.get("owner")
        if not self.root and isinstance(owner, list) and len(owner) == 2:
            return text(owner[0]), text(owner[1])
        return self.root, self.module

    def number(self, name: str) -> float:
        """Return a number of ``data``; NaN if there is none."""
        value = real(self.data.get(name))
        return math.nan if value is None else value

    def flag(self, name: str) -> bool:
        """Return whether ``data`` says so."""
        return self.data.get(name) is True

    def count(self, name: str) -> int:
        """Return a whole number of ``data``; 0 if there is none."""
        return integer(self.data.get(name)) or 0

    def share(self, part: str, whole: str) -> float:
        """Return the ratio of two whole numbers of ``data``; 0 if ``part`` is missing."""
        return self.count(part) / max(self.count(whole), 1)

    def where(self, name: str) -> tuple[str, str]:
        """Return name and `` at FILE:LINE`` of another op in ``data``, such as one that read the result; else empty."""
        other = self.data.get(name)
        return (text(other.get("op")), at_line(source_of(other))) if isinstance(other, Mapping) else ("", "")


def short_name(op: str) -> str:
    """Return ``mul`` for ``aten.mul_.Tensor``."""
    parts = op.split(".")
    return (parts[1] if len(parts) > 1 else parts[0]).strip("_")


@remembered
def scans(view: RunView) -> Sequence[Scan]:
    """Return all scans, by process and time."""
    events = view.events_of("scan")
    found = Counter(
        (Process.of(e), integer(e.get("step")))
        for e in events
        if text(e["data"].get("kind")) not in ("", "step", "coverage")
    )
    own = [e for e in events if e["data"].get("kind") == "step"]
    return [_scan(e, found[Process.of(e), integer(e.get("step"))]) for e in own]


def _scan(event: Mapping[str, Any], found: int) -> Scan:
    data = event["data"]
    step, process = integer(event.get("step")) or 0, Process.of(event)
    evidence = data.get("evidence")
    listed = evidence if isinstance(evidence, list) else []
    words = tuple(_evidence_words(e) for e in listed if isinstance(e, Mapping))
    return Scan(step, process, text(data.get("outcome")), text(data.get("why")), integer(data.get("ops")) or 0,
                text(data.get("reason")), words, found)  # fmt: skip


def _evidence_words(evidence: Mapping[str, Any]) -> str:
    """Return ``amax of `layers.2` output 12.5 -> 310 at step 20``."""
    what = text(evidence.get("what"))
    name = _EVIDENCE.get(what, what)
    place, _, tensor = text(evidence.get("tensor")).partition(":")
    kind, _, parameter = tensor.partition(":")
    module = dotted(place.partition("/")[2], parameter if kind.startswith("weight") else "")
    of = f" of `{module or place.partition('/')[0]}` {kind.replace('_', ' ')}" if place else ""
    before, now = real(evidence.get("before")), real(evidence.get("now"))
    numbers = f" {before:.3g} -> {now:.3g}" if before is not None and now is not None else ""
    return f"{name}{of}{numbers} at step {integer(evidence.get('step')) or 0}"


def facts(view: RunView, *kinds: str) -> list[Fact]:
    """Return the facts of these kinds on steps without an incident or a non-finite loss, which other rules report."""
    return [f for f in _facts(view) if f.kind in kinds]


@remembered
def _facts(view: RunView) -> list[Fact]:
    nonfinite = {(Process.of(e), integer(e.get("step"))) for e in view.events_of("incident")}
    nonfinite |= {(p, s.step) for p, steps in view.timeline.items() for s in steps if s.loss_is_bad}
    found = []
    for event in view.events_of("scan"):
        step, process = integer(event.get("step")), Process.of(event)
        kind = text(event["data"].get("kind"))
        if step is None or (process, step) in nonfinite or kind in ("step", "coverage"):
            continue
        root, module, op = (text(event.get(name)) for name in ("root", "module", "op"))
        library = claims.is_of_library(text(event.get("file")))
        found.append(Fact(kind, step, process, root, module, op, source_of(event), event["data"], library))
    return found


@dataclass(frozen=True)
class Group:
    """The facts of one place in the code, worst first. All layers of one class are one place: they share its lines."""

    view: RunView
    worst: Fact
    facts: Sequence[Fact]

    @property
    def modules(self) -> list[str]:
        """The modules that run the place's code, at most :data:`_MAX_MODULES`."""
        return sorted({f.module for f in self.facts})[:_MAX_MODULES]

    @property
    def steps(self) -> list[int]:
        """The scanned steps with a fact of this place."""
        return sorted({f.step for f in self.facts})

    @property
    def elsewhere_words(self) -> str:
        """The number of modules (if several) and of scanned steps, and whose code the line is, as sentences."""
        fact, modules, steps = self.worst, len({f.module for f in self.facts}), len(self.steps)
        also = f" The same line does so in {modules} modules." if modules > 1 else ""
        library = claims.library_words(fact.source, caller_of(fact.data)) if fact.in_library and fact.source else ""
        return f"{also} Seen on {plural(steps, 'scanned step')}, first at step {self.steps[0]}.{library}"

    def certainty(self, most: float, reason: str) -> tuple[float, str]:
        """Return the confidence of a finding and the reason for it.

        ``most`` if several scanned steps show the place's facts and their effect was measured (the backward pass needs
        none); else at most 0.7.
        """
        if len(self.steps) < 2:
            return min(most, _ONE_STEP), f"{reason}, on one scanned step only"
        if not self.worst.backward and math.isnan(self.worst.number("effect")):
            return min(most, _NOT_FOLLOWED), f"{reason}; its effect on the result that it feeds was not measured"
        return most, reason

    @property
    def done_steps(self) -> list[int]:
        """The scanned steps of the group's process, in order; without skipped steps that have none of its facts."""
        timeline, process = self.view.timeline, self.worst.process
        skipped = {s.step for s in timeline.get(process, ()) if s.skipped} - set(self.steps)
        return sorted({s.step for s in scans(self.view) if s.outcome == "done" and s.process == process} - skipped)

    @property
    def stands(self) -> bool:
        """Whether at least two scans show the place's facts, at least half of all, and not the earlier half alone.

        What only the earlier half shows has passed as training went on. Scans of steps with a non-finite loss do not
        count.
        """
        bad = {s.step for s in self.view.timeline.get(self.worst.process, ()) if s.loss_is_bad}
        done = [s for s in self.done_steps if s not in bad]
        still = [s for s in self.steps if s in done]
        later = done[len(done) // 2 :]
        return len(still) > 1 and 2 * len(still) >= len(done) and not set(still).isdisjoint(later)

    @property
    def location(self) -> Location:
        """The location of the worst fact, at the first step that shows one."""
        fact = self.worst
        root, module = fact.owner
        return Location(
            root=root or None,
            module=module if root else None,
            module_class=self.view.module_classes.get((root, module)),
            phase=_PHASES.get(fact.phase, Phase.FORWARD),
            **vars(fact.process),
            step=min(self.steps),
            op=fact.op,
            source=fact.source,
        )

    def evidence(self, limits: Mapping[str, float], reason: str) -> dict[str, Any]:
        """Return the evidence of a finding: data of the worst fact, limits, modules, all steps, the reason."""
        data = {k: v for k, v in self.worst.data.items() if k not in ("kind", "phase", "settings")}
        return {
            **data,
            "limits": dict(limits),
            "modules": self.modules,
            "scanned_steps": self.steps,
            "confidence_reason": reason,
        }

    def finding(
        self,
        rule: Rule,
        *,
        title: str,
        message: str,
        certain: tuple[float, str],
        limits: Mapping[str, float],
        prescription: Prescription,
    ) -> Finding:
        """Return the finding of ``rule`` about this place; ``certain`` is its confidence and the reason."""
        return rule.finding(
            confidence=certain[0],
            title=title,
            message=message,
            location=self.location,
            evidence=self.evidence(limits, certain[1]),
            prescription=prescription,
        )


def is_optimizers(fact: Fact) -> bool:
    """Return whether the fact's line calls ``.step(``, so that the optimizer's code ran the op."""
    return fact.source is not None and ".step(" in (fact.source.code or "")


def check_facts(
    view: RunView,
    kinds: Sequence[str],
    badness: Callable[[Fact], float],
    finding: Callable[[Group], Finding],
    *,
    seen: str,
    flushes: Callable[[Fact], bool] = lambda _: False,
    keep: Callable[[Group], bool] = lambda _: True,
    same: Callable[[Fact], Hashable] | None = None,
) -> Checked:
    """Run the check of a rule on scan facts.

    Args:
        kinds: the kinds of facts to check.
        badness: returns the weight of a fact; 0 if it is harmless.
        finding: makes the finding of one place in the code.
        seen: the result if nothing is found: "no overflow changed a result".
        flushes: returns whether a fact may be transient, because weights that begin at zero are flushed until they have
            grown. Such a fact of only one step is dropped if a later step was scanned.
        keep: returns whether to report a place, given all its facts.
        same: returns the key that facts of one finding share; by default root, op and line, or module without a line.
    """
    known = scans(view)
    done = [s for s in known if s.outcome == "done"]
    if not done:
        why = next((s.why for s in known if s.why), "no step was deep-scanned (record --deep-scan)")
        return Checked.not_applicable(why)
    checked = f"{plural(sum(s.ops for s in done), 'op')} of {plural(len(done), 'scanned step')}"
    bad = [(weight, f) for f in facts(view, *kinds) if (weight := badness(f)) > 0]
    if not bad:
        return Checked((), f"{checked}: {seen}")
    every = _groups(view, bad, same or _place_of)
    groups = [g for g in every if keep(g) and not (flushes(g.worst) and _is_transient(g, done))]
    if not groups:
        return Checked((), f"{checked}: {seen} on several steps, or beyond the first ones")
    places = plural(len(groups), "place")
    return Checked([finding(g) for g in groups[:_MAX_PLACES]], f"{places} in {checked}")


def _place_of(fact: Fact) -> Hashable:
    at = fact.source
    return (fact.root, fact.op, at.file, at.line) if at is not None else (fact.root, fact.op, fact.module)


def _groups(view: RunView, bad: Iterable[tuple[float, Fact]], same: Callable[[Fact], Hashable]) -> list[Group]:
    places = grouped((same(fact), (weight, fact)) for weight, fact in bad)
    ordered = [sorted(found, key=lambda f: -f[0]) for found in places.values()]
    ordered.sort(key=lambda found: -found[0][0])
    return [Group(view, found[0][1], [f for _, f in found]) for found in ordered]


def _is_transient(group: Group, done: Sequence[Scan]) -> bool:
    """Return whether a single step has facts of the group, and a later step of the process was scanned."""
    fact = group.worst
    return len(group.steps) == 1 and any(s.process == fact.process and s.step > fact.step for s in done)
