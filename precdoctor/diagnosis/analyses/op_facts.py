"""The ops of replayed steps, read from the ``events`` table as typed values.

A :class:`Replay` is one incident, op by op: the failing step run again, or the training itself under a live trace. The
non-finite family decides which op is the culprit, and why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from precdoctor.diagnosis.analyses.bad_data import BadTensor, field_words
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.claims.finding import Source, is_of_library
from precdoctor.diagnosis.survey.rows import dotted, integer, known_format, source_of, text
from precdoctor.numerics.formats import Format
from precdoctor.numerics.nonfinite import plain_name

#: Bits of ``bad_in`` and ``bad_out``: the kinds of non-finite values in an operand or result.
NAN, POS_INF, NEG_INF = 1, 2, 4
_OPERAND_COUNTS = ("numel", "nan", "pos_inf", "neg_inf", "zero", "negative")
_OPERAND_NUMBERS = ("min", "max", "amax", "amin_nonzero", "value")


@dataclass(frozen=True)
class Op:
    """One op of a replay."""

    index: int
    name: str
    phase: str
    root: str
    #: FQN of the module whose code runs the op; None if the log has none.
    module: str | None
    #: The line of user code that ran the op; for a backward op, the line that ran its forward op.
    source: Source | None
    node: str | None
    #: Backward ops: index of the forward op whose gradient this op computes; None in a backward pass written by hand.
    forward: int | None
    bad_in: tuple[int, ...]
    bad_out: int
    #: For each operand: indices of the ops that made it, or ``(kind, name)`` if it existed before the replay.
    makers: tuple[tuple[int, ...] | tuple[str, str], ...]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    #: The first non-finite result computed in FP64; the first result if none is non-finite.
    reference: Operand | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: Divisions: the integer operands.
    integers: tuple[Operand, ...] = ()
    #: Optimizer steps: name of the parameter in its module.
    parameter: str = ""
    #: Optimizer steps that made state but not the weight non-finite: name of the state tensor.
    state: str = ""
    #: Whether ``source`` is in an installed package; ``caller`` is then the user's last line before it, if known.
    in_library: bool = False
    caller: Source | None = None
    #: Names of operands whose values nothing saved, so that they may have been non-finite.
    unknown: tuple[str, ...] = ()
    #: Lines that lead to an operand made without a gradient and that, by the source, can make NaN or infinity.
    made_at: tuple[Source, ...] = ()

    @property
    def short(self) -> str:
        """``log`` for ``aten.log.default`` and ``aten.log_.default``."""
        return plain_name(self.name)

    def operand(self, *arguments: str) -> Operand | None:
        """Return the first operand with one of these argument names; None without one."""
        return next((o for o in self.operands if o.argument in arguments), None)

    @property
    def derivative_of(self) -> str:
        """The function of torch's whose derivative the op computes: ``Pow`` for ``PowBackward0``; else empty.

        Nodes of functions with a ``backward`` written by hand have no number behind their name.
        """
        node = self.node or ""
        return node.rstrip("0123456789").removesuffix("Backward") if node[-1:].isdigit() else ""

    @property
    def runs_in_hook(self) -> bool:
        """Whether a hook ran the op: these nodes of torch's compute nothing by themselves."""
        node = (self.node or "").removeprefix("torch::autograd::")
        return node.startswith(("AccumulateGrad", "BackwardHookFunction"))

    @property
    def function_name(self) -> str:
        """Of a backward op: the name of the function it belongs to (``SafeNorm``); its own without one."""
        name = (self.node or self.short).removesuffix("Backward")
        own = name.removeprefix("GeneratedBackwardFor_")  # torch.library.register_autograd
        return name if own == name else own.removesuffix("_default")

    @property
    def first_operand(self) -> Operand | None:
        """The first operand; None if the log has none."""
        return self.operands[0] if self.operands else None

    @property
    def result_format(self) -> Format | None:
        """The floating-point format of the first result; None if the log has none."""
        return known_format(self.results[0].dtype) if self.results else None

    @property
    def divisor(self) -> Operand | None:
        """The divisor of a division; None if the log lacks it."""
        if self.short == "reciprocal":
            return self.first_operand
        named = next((o for o in (*self.operands, *self.integers) if o.argument in {"other", "tensor2"}), None)
        return named or (self.operands[-1] if len(self.operands) > 1 else None)

    @property
    def lacking(self) -> str:
        """The operands that the log lacks, by name if it has the names; else ``its operands``."""
        names = " and ".join(f"`{name}`" for name in self.unknown)
        return f"operand{'s' if len(self.unknown) > 1 else ''} {names}" if names else "its operands"

    @property
    def finite_in_fp64(self) -> bool | None:
        """Whether the op's result is finite in FP64; None if the op was not computed in FP64."""
        return None if self.reference is None else self.reference.bad == 0


@dataclass(frozen=True)
class Poisoned:
    """A buffer or optimizer state tensor that the step made non-finite."""

    root: str
    module: str
    name: str
    last_finite: int | None
    facts: Operand

    @property
    def full_name(self) -> str:
        """``encoder.norm.running_var``."""
        return dotted(self.module, self.name)


@dataclass(frozen=True)
class BadSetting:
    """A hyper-parameter that is NaN or infinite."""

    #: Number of the parameter group.
    group: int
    #: ``lr``, ``weight_decay``, ``betas[1]`` ...
    name: str
    value: float

    @property
    def words(self) -> str:
        """``the learning rate of parameter group 0``."""
        what = {"lr": "learning rate", "weight_decay": "weight decay"}.get(self.name, f"setting `{self.name}`")
        return f"the {what} of parameter group {self.group}"

    @property
    def is_words(self) -> str:
        """``NaN``, ``infinite``."""
        return "NaN" if math.isnan(self.value) else "infinite"


@dataclass(frozen=True)
class Replay:
    """One incident, op by op. ``origins`` and ``path`` hold keys of ``ops``: indices in execution order."""

    outcome: str
    phase: str
    why: str
    reproduced: str
    micro_step: int | None
    origins: tuple[int, ...]
    path: tuple[int, ...]
    externals: tuple[tuple[str, str, int], ...]
    ops: Mapping[int, Op]
    call: Source | None
    root: str
    #: The floating-point arguments of the top-level call.
    batch: tuple[Operand, ...] = ()
    changed_arguments: tuple[str, ...] = ()
    changed_attributes: tuple[str, ...] = ()
    #: ``buffers`` or ``optimizer-state`` if nothing else was non-finite.
    target: str = ""
    poisoned: tuple[Poisoned, ...] = ()
    #: Whether weights, optimizer state and buffers were all finite as the step began; None if not checked.
    finite_before: bool | None = None
    #: Root, module and name of the first parameter that an optimizer step made non-finite.
    weight: tuple[str, str, str] | None = None
    #: Number of successive steps that the loss scaler skipped, up to and including this one.
    skips: int = 1
    #: Lines that lead to the arguments of the call and that, by the source, can make NaN or infinity; if one was bad.
    made_at: tuple[Source, ...] = ()
    #: Whether code of an installed package called the top-level module.
    called_by_library: bool = False
    #: Whether the ops were traced in the training itself, not in a second pass.
    live: bool = False
    #: Whether no torch op made the value, although the trace began before the step's first call of a model.
    made_outside: bool = False
    #: Non-finite hyper-parameters of the parameter groups that an optimizer step made non-finite.
    bad_settings: tuple[BadSetting, ...] = ()
    #: Non-finite tensors in the last batches of the data loaders.
    bad_data: tuple[BadTensor, ...] = ()
    #: Whether the last batches of the data loaders were finite throughout; None if unknown.
    data_is_finite: bool | None = None
    #: Whether the script has given the forward pass up: no optimizer step followed it.
    given_up: bool = False
    #: Whether it is a call of a trained model without gradients that returned something non-finite; the step is the one
    #: before the call.
    evaluation: bool = False
    #: Of such a call, the number of samples that had no finite element left.
    bad_samples: int = 0


def reader_of(replay: Replay, op: Op) -> str:
    """Return the root that reads the result of ``op``, if ``op`` ran outside modules; else, or if unknown, empty."""
    if not replay.live or op.root or op.phase != "forward":
        return ""
    later = (replay.ops[i] for i in replay.path if i > op.index)
    return next((o.root for o in later if o.root and o.phase == "forward"), "")


def replay_of(event: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Replay:
    """Read an ``incident`` event and its ``op`` rows."""
    data = event["data"]
    live = data.get("live") is True
    ops = {op.index: op for op in map(_op, rows) if op is not None}
    before = data.get("finite_before")
    return Replay(
        outcome=text(data.get("outcome")),
        phase=text(data.get("phase")),
        why=text(data.get("why")),
        reproduced=text(data.get("reproduced")),
        micro_step=integer(data.get("micro_step")),
        origins=tuple(i for i in _integers(data.get("origins")) if i in ops),
        path=tuple(i for i in _integers(data.get("path")) if i in ops),
        externals=tuple(
            (text(e.get("kind")), text(e.get("name")), integer(e.get("op")) or 0)
            for e in _tables(data.get("externals"))
        ),
        ops=ops,
        call=source_of(event),
        called_by_library=is_of_library(text(event.get("file"))),
        root=text(event.get("root")),
        batch=tuple(map(_operand, _tables(data.get("batch")))),
        changed_arguments=tuple(map(text, _list(data.get("changed_arguments")))),
        changed_attributes=tuple(map(text, _list(data.get("changed_attributes")))),
        target=text(data.get("target")),
        weight=_weight(text(data.get("weight"))),
        skips=integer(data.get("skips_in_a_row")) or 1,
        live=live,
        made_outside=live and data.get("before_model") is True and not _integers(data.get("origins")),
        poisoned=tuple(map(_poisoned, _tables(data.get("poisoned")))),
        finite_before=all(v is True for v in before.values()) if isinstance(before, Mapping) else None,
        bad_settings=tuple(map(_bad_setting, _tables(data.get("bad_settings")))),
        bad_data=tuple(map(_delivered, _tables(data.get("bad_fields")))),
        data_is_finite=data["data_is_finite"] if isinstance(data.get("data_is_finite"), bool) else None,
        given_up=data.get("given_up") is True,
        evaluation=data.get("evaluation") is True,
        bad_samples=integer(data.get("bad_samples")) or 0,
        made_at=_made_at(event),
    )


def _bad_setting(data: Mapping[str, Any]) -> BadSetting:
    value = real(data.get("value"))
    return BadSetting(integer(data.get("group")) or 0, text(data.get("name")), math.nan if value is None else value)


def _weight(name: str) -> tuple[str, str, str] | None:
    root, _, rest = name.partition("/")
    module, _, own = rest.partition("/")
    return (root, module, own) if own else None


def _poisoned(data: Mapping[str, Any]) -> Poisoned:
    root, module, name = (text(data.get(k)) for k in ("root", "module", "name"))
    return Poisoned(root, module, name, integer(data.get("last_finite_step")), _operand(data))


def _delivered(data: Mapping[str, Any]) -> BadTensor:
    held, samples, indices = _operand(data), _integers(data.get("samples")), _integers(data.get("indices"))
    return BadTensor(
        name=field_words(text(data.get("field")), "field"),
        counts=(held.nan, held.pos_inf, held.neg_inf),
        numel=held.numel,
        first_bad=held.first_bad,
        bad_samples=integer(data.get("bad_samples")) or len(samples),
        indices=indices if len(indices) == len(samples) else (),
        in_order=data.get("in_order") is True,
        rows=data.get("rows") is True,
        delivered=True,
    )


def _op(event: Mapping[str, Any]) -> Op | None:
    data = event["data"]
    index = integer(data.get("index"))
    if index is None:
        return None
    return Op(
        index=index,
        name=text(event.get("op")),
        phase=text(data.get("phase")),
        root=text(event.get("root")),
        module=event["module"] if isinstance(event.get("module"), str) else None,
        source=source_of(event),
        node=text(data.get("node")) or None,
        forward=integer(data.get("forward")),
        bad_in=_integers(data.get("bad_in")),
        bad_out=integer(data.get("bad_out")) or 0,
        makers=tuple(map(_maker, _list(data.get("sources")))),
        operands=tuple(map(_operand, _tables(data.get("operands")))),
        integers=tuple(map(_operand, _tables(data.get("integers")))),
        results=tuple(map(_operand, _tables(data.get("results")))),
        reference=_operand(data["reference"]) if isinstance(data.get("reference"), Mapping) else None,
        parameter=text(data.get("parameter")),
        state=text(data.get("state")),
        in_library=is_of_library(text(event.get("file"))),
        caller=caller_of(data),
        unknown=tuple(map(text, _list(data.get("unknown")))),
        made_at=_made_at(event),
        settings=data["settings"] if isinstance(data.get("settings"), Mapping) else {},
    )


def _made_at(event: Mapping[str, Any]) -> tuple[Source, ...]:
    lines = ({"file": event.get("file"), **line} for line in _tables(event["data"].get("made_at")))
    return tuple(source for line in lines if (source := source_of(line)) is not None)


def _operand(data: Mapping[str, Any]) -> Operand:
    first = data.get("first_bad")
    counts: dict[str, Any] = {name: integer(data.get(name)) or 0 for name in _OPERAND_COUNTS}
    numbers: dict[str, Any] = {name: real(data.get(name)) for name in _OPERAND_NUMBERS}
    return Operand(
        argument=text(data.get("argument")),
        dtype=text(data.get("dtype")),
        shape=_integers(data.get("shape")),
        first_bad=_integers(first) if isinstance(first, list) else None,
        **counts,
        **numbers,
    )


def _maker(value: Any) -> tuple[int, ...] | tuple[str, str]:
    if isinstance(value, Mapping):
        return (text(value.get("kind")), text(value.get("name")))
    return _integers(value)


def caller_of(data: Mapping[str, Any]) -> Source | None:
    """Return the user's last line before the library that ran an op; None if the op's data has none."""
    caller = data.get("caller")
    return source_of(caller) if isinstance(caller, Mapping) else None


def real(value: Any) -> float | None:
    """Convert a JSON number, or the string of one (such as ``"NaN"``), to a float; None for anything else."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tables(value: Any) -> list[Mapping[str, Any]]:
    return [v for v in _list(value) if isinstance(v, Mapping)]


def _integers(value: Any) -> tuple[int, ...]:
    numbers = (real(v) for v in _list(value))
    return tuple(int(n) for n in numbers if n is not None and math.isfinite(n))
