"""The data model of the family: incident, cause and culprit, with the phrases that all reports of an incident share.

:mod:`.incident_search` builds incidents; :mod:`.incident_report` turns them into findings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from precdoctor.diagnosis.analyses.bad_data import BadTensor, as_given, as_read, delivered_tensor, field_words
from precdoctor.diagnosis.analyses.op_facts import Op, Replay
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.analyses.origin import Origin, Sighting
from precdoctor.diagnosis.claims.finding import Phase, Prescription, Source, at_line
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.divergence.onset import Divergence
from precdoctor.diagnosis.survey.rows import TensorRow, known_format
from precdoctor.diagnosis.survey.view import Process, RunView

#: Rules whose findings precede a non-finite value or show the same fault in other numbers, at any step.
LEAD_TO_NONFINITE = ("PD106", "PD302", "PD304", "PD504", "PD506", "PD601", "PD602", "PD603", "PD604", "PD605", "PD606")


@dataclass(frozen=True)
class Cause:
    """Why a value became non-finite: name, confidence and reason; ``name`` is None if the log shows no cause."""

    name: str | None
    confidence: float
    why: str

    @property
    def in_brackets(self) -> str:
        """`` (log-of-nonpositive)``, for a title; empty if the cause is unknown or ``other``."""
        return f" ({self.name})" if self.name not in (None, "other") else ""

    @property
    def sentence(self) -> str:
        """`` Cause: log-of-nonpositive: its operand holds 3 exact zeros.``; empty without a cause."""
        if self.name is None:
            return ""
        return f" Cause: {self.why}." if self.name == "other" else f" Cause: {self.name}: {self.why}."

    @property
    def may_pass_on(self) -> bool:
        """Whether the op may have read the non-finite value, because the log lacks an operand."""
        return MAY_BE_NONFINITE in self.why


#: A clause on operands that the log lacks.
MAY_BE_NONFINITE = "which may have been non-finite"
UNKNOWN = Cause(None, 0.0, "it is the first recorded tensor that is not finite; the op that made it is not in the log")


@dataclass(frozen=True)
class CulpritOp:
    """The op that made the first non-finite value, or the first op that read a value from before the step."""

    op: Op
    #: Kind and name of the tensor from before the step, if the op only read it: ``weight``, ``computed`` (a weight made
    #: of others), ``buffer``, ``batch``, ``argument`` or ``constant``.
    external: tuple[str, str] | None = None
    #: Intended infinities (a ``-inf`` mask) that the op turned into NaN or +Inf: the op that wrote them, or kind and
    #: name of the tensor that held them before the step.
    mask: Op | tuple[str, str] | None = None

    @property
    def of_target(self) -> bool:
        """Whether the external tensor is the target of a loss function, and so data, although no module reads it.

        It is not if the source shows that the loss code computes it.
        """
        constant = self.external is not None and self.external[0] == "constant" and not self.op.made_at
        return constant and any(o.argument == "target" and o.bad for o in self.op.operands)

    @property
    def external_operand(self) -> Operand | None:
        """The external tensor as the op read it; None if the log lacks it."""
        return next((o for o, m in zip(self.op.operands, self.op.makers, strict=False) if m == self.external), None)

    def delivered(self, bad_data: Sequence[BadTensor]) -> BadTensor | None:
        """The one of the non-finite tensors from the data loaders that a nameless constant is; None if it is none."""
        if self.external != ("constant", ""):
            return None
        if (operand := self.external_operand) is None or not operand.bad:
            return bad_data[0] if len(bad_data) == 1 else None
        return delivered_tensor(bad_data, as_read("", operand))


@dataclass(frozen=True, kw_only=True)
class Culprit(CulpritOp):
    """The op that a replayed incident is attributed to, and why it failed."""

    replay: Replay
    phase: Phase
    cause: Cause

    @property
    def at_line(self) -> str:
        """`` at train.py:12``; empty if the line is unknown."""
        return at_line(self.op.source)

    @property
    def made_at(self) -> tuple[Source, ...]:
        """Lines that may have made the tensor from outside of the replay, the closest first; empty for the loader's."""
        if self.external is None or self.data is not None:
            return ()
        return self.replay.made_at if self.external[0] == "batch" else self.op.made_at

    @property
    def is_line_read(self) -> bool:
        """Whether the line of loss code that made the tensor was read from the source, and no replay ran it."""
        return bool(self.made_at) and self.external == ("constant", "")

    @property
    def certainty(self) -> float:
        """Confidence of the cause; for a forward or backward pass less 0.1 if its replay was not bit for bit, and less
        0.1 if the line was read from the source.
        """
        confidence = self.cause.confidence
        if self.replay.phase == "optimizer":
            return confidence
        return round(confidence - 0.1 * ((self.replay.reproduced != "bit-for-bit") + self.is_line_read), 2)

    @property
    def bad_elements(self) -> int:
        """Number of non-finite elements in the op's results."""
        return sum(r.bad for r in self.op.results)

    @property
    def forward_op(self) -> Op | None:
        """The forward op whose derivative the op computes; None for a forward op, or if the log lacks it."""
        return self.replay.ops.get(self.op.forward) if self.op.forward is not None else None

    @property
    def function(self) -> Op | None:
        """The forward op that the op is, or whose derivative it computes; None if the log lacks it."""
        return self.forward_op if self.op.phase == "backward" else self.op

    @property
    def function_name(self) -> str:
        """Short name of :attr:`function`: ``log`` for ``log`` and for ``LogBackward0``."""
        made = self.function
        return made.short if made is not None else (self.op.node or self.op.short).partition("Backward")[0].lower()

    @property
    def predicted_effect(self) -> dict[str, Any]:
        """A prescription's predicted effect if all results of the op become finite."""
        return {"nonfinite_elements": {"from": self.bad_elements, "to": 0}}

    @property
    def external_tensor(self) -> Operand | None:
        """The tensor from before the step, as the model got it, else as the op read it; None if not in the log."""
        if self.external is None:
            return None
        argument = next((o for o in self.replay.batch if o.argument == self.external[1]), None)
        return argument if argument is not None and self.external[1] else self.external_operand

    @property
    def data(self) -> BadTensor | None:
        """The non-finite tensor of the data; None if the op read no data, or if code after the loader spoilt it."""
        tensor, delivered = self.external_tensor, self.replay.bad_data
        if self.external is None or self.phase is not Phase.DATA:
            return None
        if tensor is None or not tensor.bad:
            return delivered[0] if len(delivered) == 1 else None
        read = as_read("the target" if self.of_target else field_words(self.external[1], "argument"), tensor)
        spoilt_later = self.external[0] == "batch" and self.replay.data_is_finite
        return delivered_tensor(delivered, read) or (None if spoilt_later else read)


@dataclass(frozen=True)
class Incident:
    """One origin of non-finite values, and everything that followed from it, over steps and ranks."""

    code: str
    process: Process
    step: int
    phase: Phase
    #: None if only an op is known, or if the step's tensors are not in the log (``unrecorded`` holds the reason).
    origin: Origin | None
    cause: Cause
    #: The tensors around the origin in order of execution, for the evidence.
    path: tuple[TensorRow, ...] = ()
    unrecorded: str | None = None
    #: How weights became non-finite: ``optimizer`` (in its step), ``between`` (since the step before) or ``start``
    #: (before the first step). ``poison``: only buffers or optimizer state became non-finite. Else empty.
    how: str = ""
    #: Number of non-finite tensors by kind at the incident's step, the origin included.
    bad: Mapping[str, int] = field(default_factory=dict)
    #: The last step after which weights, optimizer state and buffers were all finite.
    last_finite: int | None = None
    #: The step trains nothing.
    inference: bool = False
    #: The last of the incident's non-finite steps, and their number.
    last_step: int = 0
    bad_steps: int = 1
    #: Every non-finite step was skipped, and a healthy one followed.
    recovered: bool = False
    #: What skipped the non-finite steps: ``scaler``, ``policy`` (``--on-nonfinite skip``), ``script``, else empty.
    #: ``evaluation``: a call without gradients was non-finite, after the step.
    skipped_by: str = ""
    #: Of a call without gradients, the number of samples without a finite element.
    bad_samples: int = 0
    #: The origin's tensor on healthy steps.
    history: tuple[Sighting, ...] = ()
    #: The ranks that reported the incident.
    ranks: tuple[int, ...] = ()
    culprit: Culprit | None = None
    #: Without a culprit: the op whose result is the first known to be non-finite; it may only have passed that on.
    first_seen: Op | None = None
    #: Steps at which the same incident began.
    occurrences: tuple[int, ...] = ()
    #: Steps of later, not fully recorded incidents that are probably this one again.
    likely_steps: tuple[int, ...] = ()
    #: Only one step was non-finite, or a step followed that was neither non-finite nor skipped.
    passed: bool = False
    #: The replay of a step that made only buffers or optimizer state non-finite.
    poison: Replay | None = None
    #: The first step at which the poisoned tensor made the loss or a gradient non-finite; None if none did.
    shown_at: int | None = None
    #: How training diverged before the incident, if the divergence made the operands huge.
    divergence: Divergence | None = None

    @property
    def bad_tensor(self) -> BadTensor | None:
        """The tensor that was non-finite before the model read it; None if the incident is not in the data."""
        if self.culprit is not None:
            return self.culprit.data
        return as_given(self.origin.row) if self.phase is Phase.DATA and self.origin is not None else None

    @property
    def is_evaluation(self) -> bool:
        """Whether it is a call without gradients, after the step, that returned something non-finite."""
        return self.skipped_by == "evaluation"

    @property
    def identity(self) -> tuple[object, ...]:
        """A key that is equal for all occurrences of the same fault: code, place, cause."""
        where: tuple[object, ...] | None = None
        if self.culprit is not None:
            where = (self.culprit.replay.root, self.culprit.op.module, self.culprit.op.name, self.culprit.op.source)
        elif self.origin is not None:
            where = (self.origin.root, self.origin.module, self.origin.row.key)
        return (self.code, where, self.cause.name, self.how, self.unrecorded is not None, self.is_evaluation)

    @property
    def preceding(self) -> TensorRow | None:
        """The last healthy tensor before the origin; None if the log has none."""
        return self.origin.after if self.origin is not None else None

    @property
    def resume_advice(self) -> str:
        """The checkpoint to resume from, in one or two sentences."""
        poisoned = self.culprit is not None and self.culprit.replay.poisoned
        if self.recovered and not poisoned:
            return f"{_SKIPS[self.skipped_by]}, so the weights are intact: nothing to resume."
        if self.inference:
            return "Nothing was trained, so there is no checkpoint to go back to."
        if self.divergence is not None and self.divergence.root == 0:
            return "Training diverged from its first step on: no checkpoint is sound, start again."
        if self.divergence is not None:
            return f"Resume from a checkpoint before step {self.divergence.root}, where training diverged."
        if self.last_finite is None:
            return "No earlier step was finite: start again, or resume from an older checkpoint."
        return (
            f"Weights, optimizer state and buffers were last all finite at step {self.last_finite}; resume from a "
            "checkpoint at or before that step."
        )

    @property
    def unseen_words(self) -> str:
        """``, unseen by the loss`` if the poisoned tensor made no loss or gradient non-finite; else empty."""
        return ", unseen by the loss" if self.shown_at is None else ""

    @property
    def first_seen_words(self) -> str:
        """A sentence on the op whose result is the first known to be non-finite; empty without one."""
        if (op := self.first_seen) is None:
            return ""
        held = next((result.count_words() for result in op.results if result.bad), "non-finite values")
        return (
            f" The replay first sees a non-finite value in the result of {op.name}{at_line(op.source)}: {held}. It "
            f"lacks {op.lacking}, so the value may come from there."
        )

    @property
    def headroom_words(self) -> str:
        """A sentence: how close the origin's tensor was to its limit on the last healthy step; empty if unknown."""
        until = self.step if self.divergence is None else self.divergence.root
        sightings = [s for s in self.history if s.step < until and s.headroom is not None and s.amax is not None]
        if not sightings or self.origin is None:
            return ""
        headroom = sightings[-1].headroom or 0.0
        room = f"2^{headroom:.1f} times" if headroom >= 0.05 else "just"
        step, amax = sightings[-1].step, sightings[-1].amax
        return f" At healthy step {step} {self.origin.row.label} reached {amax:.4g}, {room} below the limit."

    @property
    def consequence_words(self) -> str:
        """A sentence: the other tensors that were non-finite at the incident's step; empty if there were none."""
        own = self.origin.row.kind if self.origin is not None else None
        counts = {noun: self.bad.get(kind, 0) - (kind == own) for kind, noun in _NOUNS.items()}
        effects = ["the loss" if noun == "loss" else plural(n, noun) for noun, n in counts.items() if n > 0]
        return f" Also non-finite at this step: {', '.join(effects)}." if effects else ""

    def held_words(self, view: RunView, row: TensorRow) -> str:
        """``At step 37, `blocks.0` output (float16) holds 12 NaN of 4,096 elements; limit 0.``"""
        return f"{self.at_step(view).capitalize()}, {row.label} ({row.dtype}) holds {row.count_words()}; limit 0."

    def preceding_words(self, row: TensorRow, before: TensorRow | None) -> str:
        """A sentence on the last finite tensor before the origin ``row``; empty if the log has none."""
        if before is None or before.amax is None:
            return ""
        fmt, in_loss = known_format(row.dtype), self.phase is Phase.LOSS
        zeros = f" and holds {plural(before.zero, 'exact zero')}" if in_loss and before.zero else ""
        limit = f"; {row.dtype} ends at {fmt.max:.6g}" if fmt is not None else ""
        reach = f"{before.label}, reaches {before.amax:.4g}{zeros}{limit}"
        return f" Everything before it is finite; the last tensor, {reach}."

    def unrecorded_message(self, view: RunView, what: str) -> str:
        """The message for a step whose tensors are not in the log."""
        first = max(0, self.step - 8)
        return (
            f"{what} {self.at_step(view)}, but {self.unrecorded}, so its origin is unknown. "
            f"Record again with --every 1 --steps {first}:{self.step + 1}. {self.resume_advice}"
        )

    def at_step(self, view: RunView) -> str:
        """``at step 37``, with the rank if there are several, and the micro-step if gradients accumulate."""
        words = f"{'after' if self.is_evaluation else 'at'} step {self.step}"
        if self.origin is not None and self.origin.row.first_bad_micro_step and self.phase is not Phase.OPTIMIZER:
            words += f" (micro-step {self.origin.row.first_bad_micro_step})"
        return f"{words} on rank {self.process.rank}" if len({p.rank for p in view.processes}) > 1 else words


class Report(NamedTuple):
    """Title, message and prescription of a finding about an incident."""

    title: str
    message: str
    prescription: Prescription


#: What kept the weights from a non-finite step, by ``Incident.skipped_by``.
_SKIPS = {
    "scaler": "The loss scaler skipped these steps",
    "policy": "With `--on-nonfinite skip` these steps changed no weight",
    "script": "The script gave these batches up",
    "evaluation": "The call was made without gradients (a validation pass, a rollout)",
    "": "These steps changed no weight",
}
_NOUNS = {
    "batch": "input tensor",
    "input": "input",
    "output": "output",
    "loss": "loss",
    "grad_output": "output gradient",
    "weight_grad": "weight gradient",
    "weight_grad_step": "optimizer input",
    "weight": "weight",
    "update": "weight update",
}
