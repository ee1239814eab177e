"""How an incident that was put under the microscope is told: op, line, operands, reference, and the way there."""

from __future__ import annotations

from typing import Any

from precdoctor.diagnosis.claims.finding import Location
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import UNDERFLOWED
from precdoctor.diagnosis.families.nonfinite.culprit import Culprit
from precdoctor.diagnosis.families.nonfinite.culprit_words import data_of, held_by
from precdoctor.diagnosis.families.nonfinite.incident_report import (
    Told,
    consequences,
    headroom_story,
    resume_advice,
    where_words,
)
from precdoctor.diagnosis.families.nonfinite.incident_search import Incident
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import mend_buffer, prescribe
from precdoctor.diagnosis.families.nonfinite.poisoned_state import poison_words
from precdoctor.diagnosis.families.nonfinite.tensor_causes import Cause
from precdoctor.diagnosis.survey.op_facts import BadSetting, Examined, Op, Operand
from precdoctor.diagnosis.survey.origin import class_of
from precdoctor.diagnosis.survey.rows import known_format
from precdoctor.diagnosis.survey.view import RunView

#: Causes of which the way towards the limit tells something.
_OF_RANGE = frozenset({"matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow", "exp-overflow"})
#: Ops told of in the path.
_PATH = 8


def tell_culprit(view: RunView, incident: Incident, culprit: Culprit) -> Told:
    """Title, message and prescription of an examined incident."""
    place, op = _place(view, culprit), culprit.op
    line = f" at {culprit.source.file}:{culprit.source.line}" if culprit.source is not None else ""
    cause = culprit.cause.in_brackets
    external = culprit.blamed.external
    if op.phase == "optimizer":
        return _tell_optimizer(view, incident, culprit)
    data = data_of(culprit)
    if data is not None:
        title = f"{data.title}{cause}"
    elif external is not None and culprit.examined.data_is_finite and external[0] == "batch":
        title = f"code between the data loader and {place} made {external_words(culprit)} non-finite{cause}"
    elif external is not None:
        words = external_words(culprit)
        title = f"{words}{',' if ', ' in words else ''} was non-finite before {place} read it{cause}"
    elif incident.poison is not None:
        name = incident.poison.poisoned[0].full_name
        title = f"{op.short} in {place} makes buffer `{name}` non-finite, unseen by the loss{cause}"
    elif op.phase == "backward":
        title = f"the backward pass of {_forward_name(culprit)} in {place} makes the first non-finite gradient{cause}"
    else:
        title = f"{op.short} in {place} makes the first non-finite value{cause}"
    if settings := culprit.examined.bad_settings:
        title = _settings_title(incident, settings[0], f"{op.short} in {place} makes weights non-finite")
    message = f"{where_words(view, incident).capitalize()}, {op.name}{line} "
    message += f"read {external_words(culprit)}{_batch_words(culprit)}. " if external is not None else f"{_made(op)}. "
    if (weight := culprit.examined.weight) is not None:
        message += f"It ends up in `{'.'.join(filter(None, weight[1:]))}`. "
    if data is not None:
        message = f"{message.rstrip('. ')}; limit 0.{data.more}"
    else:
        message = (message + _operand_words(op)).rstrip() + culprit.cause.sentence
    if culprit.cause.name is None and external is not None and not external[1]:
        message += " It was made without a gradient, so no replay of the step reaches the op that made it."
    message += _reference_words(op, culprit.cause) if external is None else ""
    message += headroom_story(incident) if culprit.cause.name in _OF_RANGE else ""
    effects = consequences(incident)
    if effects:
        message += f" In the same step it reached {', '.join(effects)}."
    message += poison_words(incident) + _replay_words(culprit)
    return (
        f"{title}{line if external is None else ''}",
        f"{message} {resume_advice(incident)}",
        prescribe(view, incident, culprit),
    )


def _tell_optimizer(view: RunView, incident: Incident, culprit: Culprit) -> Told:
    op = culprit.op
    name = f"`{'.'.join(p for p in (op.module, op.parameter) if p)}`"
    made = f"state `{op.state}` of {name}" if op.state else name
    gradient = op.operand("grad")
    if gradient is not None and gradient.bad:
        title = f"the optimizer step left {made} and its gradient non-finite{culprit.cause.in_brackets}"
    else:
        title = f"the optimizer step made {made} non-finite from finite gradients{culprit.cause.in_brackets}"
    if settings := culprit.examined.bad_settings:
        title = _settings_title(incident, settings[0], f"the optimizer step made {made} non-finite")
    message = f"{where_words(view, incident).capitalize()}, {op.name} {_made(op)} in {name}. {_operand_words(op)}"
    message = message.rstrip() + culprit.cause.sentence + poison_words(incident)
    effects = consequences(incident)
    if effects:
        message += f" In the same step also non-finite: {', '.join(effects)}."
    return title, f"{message} {resume_advice(incident)}", prescribe(view, incident, culprit)


def _settings_title(incident: Incident, setting: BadSetting, made: str) -> str:
    return f"{setting.words} is {setting.is_words} at step {incident.step}: {made}"


def tell_poison(view: RunView, incident: Incident, examined: Examined) -> Told:
    """Buffers that became non-finite in code no replay reaches."""
    first = examined.poisoned[0]
    title = f"`{first.full_name}` becomes non-finite, unseen by the loss"
    message = f"{where_words(view, incident).capitalize()},{poison_words(incident)} {examined.why.capitalize()}."
    return title, f"{message} {resume_advice(incident)}", mend_buffer(incident, first)


def locate_culprit(view: RunView, incident: Incident, culprit: Culprit, known: Location) -> Location:
    """The module-level location, narrowed to the op and its line."""
    module, op = culprit.module, _forward_op(culprit)
    root, weight = culprit.examined.root or culprit.op.root or known.root, culprit.examined.weight
    if weight is not None:
        root, module = weight[0], weight[1]
    elif culprit.examined.phase != "optimizer" and not culprit.examined.root:
        module = None
    if (external := culprit.blamed.external) is not None:
        module, op = (external[1].rpartition(".")[0] if external[0] in {"weight", "buffer"} and root else ""), None
    return Location(
        root=root,
        module=module,
        module_class=class_of(view.module_classes, root or "", module or "") or known.module_class,
        kind=_kind(culprit) or known.kind,
        phase=culprit.phase,
        rank=incident.process.rank,
        step=incident.step,
        op=op,
        source=culprit.source,
    )


def _kind(culprit: Culprit) -> str | None:
    return {"buffers": "buffer", "optimizer-state": "opt_state"}.get(culprit.examined.target)


def culprit_evidence(culprit: Culprit) -> dict[str, Any]:
    """What was measured at the op, and on the way to and from it."""
    examined, op = culprit.examined, culprit.op
    return {
        "operation": {
            "op": op.name,
            "phase": op.phase,
            "node": op.node,
            "operands": [_told(o) for o in op.operands],
            "results": [_told(o) for o in op.results],
            "reference_fp64": _told(op.reference) if op.reference is not None else None,
            "settings": dict(op.settings),
        },
        "op_path": [_step_of_path(examined.ops[i]) for i in _around(culprit)],
        "reproduced": examined.reproduced,
        "micro_step": examined.micro_step,
        "skips_in_a_row": examined.skips,
        "batch": [_told(o) for o in examined.batch],
        "changed_arguments": list(examined.changed_arguments),
        "changed_attributes": list(examined.changed_attributes),
        "confidence_reason": _reason(culprit),
    }


_REPRODUCED = {
    "bit-for-bit": "and its outputs are the run's bit for bit",
    "in-kind": "with the same kind of result, not bit for bit",
}


def _reason(culprit: Culprit) -> str:
    if culprit.examined.live:
        return "the run itself was traced op by op"
    if culprit.op.phase == "optimizer":
        return "weights, gradients and state were read right after the step"
    return f"the step was run again op by op, {_REPRODUCED.get(culprit.examined.reproduced, 'not compared')}"


def _around(culprit: Culprit) -> list[int]:
    """Ops that fed the culprit, the culprit, and what became of it."""
    examined, at = culprit.examined, culprit.op.index
    behind = set(examined.path) | set(examined.origins)
    before = [i for i in sorted(examined.ops) if i < at and i not in behind]
    after = [i for i in sorted(behind) if i > at]
    return [*before[-3:], at, *after[: _PATH - 4]]


def _step_of_path(op: Op) -> dict[str, Any]:
    result = op.results[0] if op.results else None
    return {
        "op": op.name,
        "module": op.module,
        "source": op.source,
        "dtype": result.dtype if result is not None else None,
        "amax": result.amax if result is not None else None,
        "headroom_binades": _headroom(result),
        "bad": op.bad_out != 0,
    }


def _headroom(operand: Operand | None) -> float | None:
    fmt = known_format(operand.dtype) if operand is not None else None
    return fmt.headroom(operand.amax) if fmt is not None and operand is not None and operand.amax else None


def _told(operand: Operand) -> dict[str, Any]:
    return {name: value for name, value in vars(operand).items() if value not in (None, "")}


# -- words ------------------------------------------------------------------------------------------------------------


def _place(view: RunView, culprit: Culprit) -> str:
    if culprit.examined.phase == "optimizer":
        return "the optimizer step"
    if culprit.examined.by_hand:
        return "the code that makes gradients"
    if not culprit.examined.root:
        return "the loss code"
    root, module = culprit.examined.root, culprit.module or ""
    if culprit.module is None and culprit.op.phase == "forward":
        return f"the code around `{root}`"
    kind = class_of(view.module_classes, root, module)
    return f"`{module or root}`" + (f" ({kind})" if kind and module else "")


_EXTERNALS = {
    "batch": "the batch, argument",
    "argument": "argument",
    "weight": "weight",
    "buffer": "buffer",
    "data": "the data, tensor",
    "variable": "tensor",
}
#: Arguments of loss functions that say what a nameless tensor is.
_ROLES = {"target": "the target", "weight": "the weight of the loss function", "pos_weight": "`pos_weight`"}


def external_words(culprit: Culprit) -> str:
    """What the op read: by its name, else by its role in the call, as far as that says something."""
    external, op = culprit.blamed.external, culprit.op
    if external is None or external[1]:
        kind, name = external or ("", "")
        return f"{_EXTERNALS.get(kind, 'tensor')} `{name}`"
    bad = (o.argument for o, maker in zip(op.operands, op.makers, strict=False) if maker == external and o.bad)
    return next((_ROLES[name] for name in bad if name in _ROLES), "a tensor made without a gradient")


def _forward_op(culprit: Culprit) -> str | None:
    """The op as the user called it: for a gradient, the one whose derivative it is."""
    made = culprit.examined.ops.get(culprit.op.forward) if culprit.op.forward is not None else None
    return made.name if made is not None else culprit.op.name


def _forward_name(culprit: Culprit) -> str:
    made = culprit.examined.ops.get(culprit.op.forward) if culprit.op.forward is not None else None
    return made.short if made is not None else (culprit.op.node or culprit.op.short).removesuffix("Backward")


def _batch_words(culprit: Culprit) -> str:
    """What the argument or the nameless tensor held, and in which sample first."""
    held = held_by(culprit)
    if held is None or not held.bad:
        return ""
    sample = f", the first in sample {held.first_bad[0]} at {list(held.first_bad)}" if held.first_bad else ""
    return f", which holds {held.count_words()}{sample}"


def _made(op: Op) -> str:
    bad = next((r for r in op.results if r.bad), None)
    if bad is None:
        return "made a non-finite value"
    where = f", the first at {list(bad.first_bad)}" if bad.first_bad else ""
    return f"made {bad.count_words()} ({bad.dtype}{where})"


def _operand_words(op: Op) -> str:
    parts = []
    for operand in op.operands[:3]:
        name = f"`{operand.argument}`"
        if operand.amax is None:
            continue
        words = f"{name} ({operand.dtype}, {'x'.join(map(str, operand.shape)) or 'scalar'})"
        if not operand.shape and operand.value is not None:
            parts.append(f"{words} is {operand.value:.4g}")
            continue
        if operand.amax == 0.0:
            parts.append(f"{words} is 0" + (" where it is finite" if operand.bad else " throughout"))
            continue
        words += f" runs from {operand.min:.4g} to {operand.max:.4g}" + (" where it is finite" if operand.bad else "")
        if operand.value is not None:
            words += f" and is {operand.value:.4g} there"
        parts.append(words)
    return f"Operand{'s' if len(parts) > 1 else ''} {'; '.join(parts)}." if parts else ""


def _reference_words(op: Op, cause: Cause) -> str:
    if op.reference is None:
        return ""
    if op.reference.bad and UNDERFLOWED in cause.why:
        return " In FP64 these operands divide by zero, too, but a wider format keeps them from 0."
    if op.reference.bad and cause.name == "optimizer-division-by-zero":
        return " In FP64 these operands divide by zero, too."
    if op.reference.bad:
        return " In FP64 the result is non-finite, too: no wider format would help."
    if op.reference.amax is None:
        return ""
    fmt = known_format(op.results[0].dtype) if op.results else None
    if fmt is not None and op.reference.amax <= fmt.max:
        return ""  # the cause says that a number on the way left the range
    return f" In FP64 the result is finite and reaches {op.reference.amax:.4g}: the format's range ended."


def _replay_words(culprit: Culprit) -> str:
    examined = culprit.examined
    words = (
        "" if examined.reproduced == "bit-for-bit" else " The replay came to the same kind of values, not bit for bit."
    )
    if examined.changed_arguments:
        names = ", ".join(f"`{n}`" for n in examined.changed_arguments)
        words += f" The batch was modified in place after the call ({names}), so the replay saw other values."
    if examined.phase == "optimizer" and examined.why:
        words += f" In it, {examined.why}."
    return words
