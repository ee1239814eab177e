"""Reports a replayed incident: its op and line, the operands, the result in FP64, and the ops before and after.

:mod:`.incident_report` asks for texts, location and evidence; the prescription comes from :mod:`.op_prescriptions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from precdoctor.diagnosis.analyses.op_facts import BadSetting, Op, Replay, reader_of
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.analyses.origin import class_of
from precdoctor.diagnosis.claims.finding import Location, Source
from precdoctor.diagnosis.claims.words import and_more
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import (
    MAY_BE_ROUNDED,
    ROUNDING_ERROR,
    UNDERFLOWED,
    short_number,
)
from precdoctor.diagnosis.families.nonfinite.incident import Cause, Culprit, Incident, Report
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import finite_buffer, library_words, prescribe
from precdoctor.diagnosis.families.nonfinite.tensor_causes import provenance, provenance_words
from precdoctor.diagnosis.survey.rows import dotted
from precdoctor.diagnosis.survey.view import RunView

#: Causes that develop over steps, so that the headroom on the last healthy step is worth a sentence.
_RANGE_CAUSES = frozenset({"matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow", "exp-overflow"})
#: Maximum number of ops in ``op_path``, as of tensors in ``path``.
_PATH_LENGTH = 8
#: The kind of an external tensor (``CulpritOp.external``), in words before its name.
_EXTERNAL_WORDS = {
    "batch": "the batch, argument",
    "argument": "argument",
    "weight": "weight",
    "computed": "the computed weight",
    "buffer": "buffer",
}
#: Words for a nameless tensor, by the argument of the loss function that it was passed as.
_ROLE_WORDS = {"target": "the target", "weight": "the weight of the loss function", "pos_weight": "`pos_weight`"}
_REPRODUCED_WORDS = {
    "bit-for-bit": "and its outputs equal the run's bit for bit",
    "in-kind": "with the same kind of result, not shown to be equal bit for bit",
}


def report_culprit(view: RunView, incident: Incident, culprit: Culprit) -> Report:
    """Title, message and prescription of an incident with a culprit."""
    if culprit.op.phase == "optimizer":
        return _report_optimizer_step(view, incident, culprit)
    op, external, data = culprit.op, culprit.external, culprit.data
    message = f"{incident.at_step(view).capitalize()}, {op.name}{culprit.at_line} "
    message += (
        f"read {external_words(culprit)}{_external_counts(culprit)}. " if external is not None else _made(culprit)
    )
    if (weight := culprit.replay.weight) is not None:
        message += f"It ends up in `{dotted(*weight[1:])}`. "
    if data is not None:
        made_by = provenance(culprit.replay, data)
        message = f"{message.rstrip('. ')}; limit 0.{data.more or provenance_words(made_by)}"
        message += _made_at_words(culprit.replay.made_at) if made_by == "unknown" else ""
    else:
        message = (message + operand_words(op)).rstrip() + culprit.cause.sentence
    message += library_words(view, incident, culprit)
    if culprit.cause.name is None and external is not None and not external[1]:
        message += (
            " The tensor is older than the step, or was made where a trace does not reach: in another thread or in "
            "compiled code."
            if culprit.replay.live
            else " The tensor was made without a gradient, so no replay of the step reaches the op that made it."
        )
    message += _made_at_words(culprit.made_at)
    if external is not None and external[0] == "computed":
        message += " Code of the same step made it of other weights: an inner loop, or a network that makes weights."
    message += reference_words(op, culprit.cause) if external is None else ""
    message += incident.headroom_words if culprit.cause.name in _RANGE_CAUSES and made_origin(incident, op) else ""
    message += incident.consequence_words + _poison_words(incident) + _replay_words(culprit.replay)
    line = culprit.at_line if external is None else ""
    return Report(
        f"{_title(view, incident, culprit)}{line}",
        f"{message} {incident.resume_advice}",
        prescribe(view, incident, culprit),
    )


def _title(view: RunView, incident: Incident, culprit: Culprit) -> str:
    """The title of an incident in a forward or backward pass, without the line."""
    place, op, external = _place_words(view, culprit), culprit.op, culprit.external
    if settings := culprit.replay.bad_settings:
        return _settings_title(incident, settings[0], f"{op.short} in {place} makes weights non-finite")
    if (data := culprit.data) is not None:
        title = data.title(f"`{root}`" if (root := culprit.replay.root or op.root) else "the loss code")
    elif external is not None and external[0] == "batch" and culprit.replay.data_is_finite:
        title = f"code between the data loader and {place} made {external_words(culprit)} non-finite"
    elif external is not None:
        words = external_words(culprit)
        title = f"{words}{',' if ', ' in words else ''} was non-finite before {place} read it"
    elif incident.poison is not None:
        buffer = incident.poison.poisoned[0].full_name
        title = f"{op.short} in {place} makes buffer `{buffer}` non-finite{incident.unseen_words}"
    elif op.phase == "backward" and op.runs_in_hook:
        title = f"{op.short} in a hook on a gradient makes the first non-finite gradient"
    elif op.phase == "backward":
        name = forward_op.short if (forward_op := culprit.forward_op) is not None else op.function_name
        title = f"the backward pass of {name} in {place} makes the first non-finite gradient"
    else:
        returns = "returns" if culprit.cause.may_pass_on else "makes"
        title = f"{op.short} in {place} {returns} the first non-finite value"
    return f"{title}{culprit.cause.in_brackets}"


def _report_optimizer_step(view: RunView, incident: Incident, culprit: Culprit) -> Report:
    op = culprit.op
    name = f"`{dotted(op.module or '', op.parameter)}`"
    what = f"state `{op.state}` of {name}" if op.state else name
    gradient = op.operand("grad")
    if settings := culprit.replay.bad_settings:
        title = _settings_title(incident, settings[0], f"the optimizer step made {what} non-finite")
    elif gradient is not None and gradient.bad:
        title = f"the optimizer step left {what} and its gradient non-finite{culprit.cause.in_brackets}"
    else:
        title = f"the optimizer step made {what} non-finite from finite gradients{culprit.cause.in_brackets}"
    message = f"{incident.at_step(view).capitalize()}, in {name}, {op.name} {_made(culprit)}{operand_words(op)}"
    message = message.rstrip() + culprit.cause.sentence + _poison_words(incident) + incident.consequence_words
    return Report(title, f"{message} {incident.resume_advice}", prescribe(view, incident, culprit))


def _made_at_words(lines: Sequence[Source]) -> str:
    """A sentence on the lines that may have made a tensor; empty without any."""
    if not lines:
        return ""
    listed = ", ".join(f"`{s.code}` at {s.place}" if s.code else f"{s.place}" for s in lines)
    which = "one" if len(lines) == 1 else f"{len(lines)}, the closest first,"
    return f" Of the lines that lead to it, {which} can make NaN or infinity of finite numbers: {listed}."


def _settings_title(incident: Incident, setting: BadSetting, effect: str) -> str:
    return f"{setting.words} is {setting.is_words} at step {incident.step}: {effect}"


def report_poisoning(view: RunView, incident: Incident, replay: Replay) -> Report:
    """The report for poisoned buffers or optimizer state without a culprit: no replayed op made them non-finite."""
    first = replay.poisoned[0]
    title = f"`{first.full_name}` becomes non-finite{incident.unseen_words}"
    message = f"{incident.at_step(view).capitalize()},{_poison_words(incident)} {replay.why.capitalize()}."
    return Report(title, f"{message} {incident.resume_advice}", finite_buffer(incident, first))


def culprit_location(view: RunView, incident: Incident, culprit: Culprit, by_tensors: Location) -> Location:
    """Narrow ``by_tensors``, the location by tensors, to the op and its line."""
    forward_op, replay = culprit.forward_op, culprit.replay
    module, op = culprit.op.module, (forward_op if forward_op is not None else culprit.op).name
    root, weight = replay.root or culprit.op.root or by_tensors.root, replay.weight
    if weight is not None:
        root, module = weight[0], weight[1]
    elif replay.phase != "optimizer" and not replay.root:
        module = None
    kind = {"buffers": "buffer", "optimizer-state": "opt_state"}.get(replay.target)
    if (external := culprit.external) is not None:
        module = external[1].rpartition(".")[0] if external[0] in {"weight", "computed", "buffer"} and root else ""
    return Location(
        root=root,
        module=module,
        module_class=class_of(view.module_classes, root or "", module or "") or by_tensors.module_class,
        kind=kind or by_tensors.kind,
        phase=culprit.phase,
        **vars(incident.process),
        step=incident.step,
        op=op if external is None else None,
        source=culprit.made_at[0] if culprit.made_at else culprit.op.source,
    )


def culprit_evidence(culprit: Culprit) -> dict[str, Any]:
    """Evidence from the replay: the op with its operands and results, the ops around it, how the replay went."""
    replay, op = culprit.replay, culprit.op
    return {
        "operation": {
            "op": op.name,
            "phase": op.phase,
            "node": op.node,
            "operands": [_operand_facts(o) for o in op.operands],
            "results": [_operand_facts(o) for o in op.results],
            "reference_fp64": _operand_facts(op.reference) if op.reference is not None else None,
            "settings": dict(op.settings),
            **({"integers": [_operand_facts(o) for o in op.integers]} if op.integers else {}),
        },
        "op_path": _op_path(replay, op.index),
        "reproduced": replay.reproduced,
        **({"traced": True} if replay.live else {}),
        "micro_step": replay.micro_step,
        "skips_in_a_row": replay.skips,
        "batch": [_operand_facts(o) for o in replay.batch],
        "changed_arguments": list(replay.changed_arguments),
        "changed_attributes": list(replay.changed_attributes),
        "confidence_reason": _confidence_reason(culprit),
    }


def _confidence_reason(culprit: Culprit) -> str:
    if culprit.data is not None:
        return culprit.cause.why
    if culprit.is_line_read:
        return "an op of the replay read the tensor; which line made it was read from the source"
    if culprit.replay.live:
        return "the run itself was traced op by op"
    if culprit.op.phase == "optimizer":
        return "weights, gradients and state were read right after the step"
    return f"the step was replayed op by op, {_REPRODUCED_WORDS.get(culprit.replay.reproduced, 'not compared')}"


def _op_path(replay: Replay, at: int) -> list[dict[str, Any]]:
    """Up to three finite ops before the culprit, the culprit, and the ops that its non-finite result reached."""
    reached = set(replay.path) | set(replay.origins)
    before = [i for i in sorted(replay.ops) if i < at and i not in reached]
    after = [i for i in sorted(reached) if i > at]
    path = []
    for op in (replay.ops[i] for i in (*before[-3:], at, *after[: _PATH_LENGTH - 4])):
        result, fmt = next(iter(op.results), None), op.result_format
        amax = result.amax if result is not None else None
        path.append(
            {
                "op": op.name,
                "module": op.module,
                "source": op.source,
                "dtype": result.dtype if result is not None else None,
                "amax": amax,
                "headroom_binades": fmt.headroom(amax) if fmt is not None and amax else None,
                "bad": op.bad_out != 0,
            }
        )
    return path


def _operand_facts(operand: Operand) -> dict[str, Any]:
    return {name: value for name, value in vars(operand).items() if value not in (None, "")}


# -- words ------------------------------------------------------------------------------------------------------------


def _place_words(view: RunView, culprit: Culprit) -> str:
    """Where the op runs, in words: a module with its class, the loss code, the optimizer step ..."""
    replay = culprit.replay
    if replay.phase == "optimizer":
        return "the optimizer step"
    if reader := reader_of(replay, culprit.op):
        return f"the code before `{reader}`"
    if not replay.root:
        return "the loss code"
    module = culprit.op.module or ""
    if culprit.op.module is None and culprit.op.phase == "forward":
        return f"the code around `{replay.root}`"
    kind = class_of(view.module_classes, replay.root, module)
    return f"`{module or replay.root}`" + (f" ({kind})" if kind and module else "")


def external_words(culprit: Culprit) -> str:
    """The external tensor that the op read, in words: by its name, else by its role in the call, if known."""
    op, (kind, name) = culprit.op, culprit.external or ("", "")
    if name:
        return f"{_EXTERNAL_WORDS.get(kind, 'tensor')} `{name}`"
    bad = (o.argument for o, maker in zip(op.operands, op.makers, strict=False) if maker == culprit.external and o.bad)
    nameless = "a tensor made outside of the trace" if culprit.replay.live else "a tensor made without a gradient"
    return next((_ROLE_WORDS[name] for name in bad if name in _ROLE_WORDS), nameless)


def _external_counts(culprit: Culprit) -> str:
    """A relative clause: counts and first bad sample of the external tensor; empty if the log lacks them."""
    tensor = culprit.external_tensor
    if tensor is None or not tensor.bad:
        return ""
    first = tensor.first_bad
    sample = f", the first in sample {first[0]} at {list(first)}" if first else ""
    return f", which holds {tensor.count_words()}{sample}"


def _made(culprit: Culprit) -> str:
    """A predicate: what the op made. ``made 12 NaN of 4,096 elements (float16, the first at [0, 3]). ``"""
    bad = next((r for r in culprit.op.results if r.bad), None)
    made = "returned" if culprit.cause.may_pass_on else "made"
    if bad is None:
        return f"{made} a non-finite value. "
    where = f", the first at {list(bad.first_bad)}" if bad.first_bad else ""
    return f"{made} {bad.count_words()} ({bad.dtype}{where}). "


def operand_words(op: Op) -> str:
    """A sentence: dtype, shape and range of up to three operands and all integer ones; empty if the log has none."""
    parts = []
    for operand in (*op.operands[:3], *op.integers):
        if operand.amax is None:
            continue
        words = f"`{operand.argument}` ({operand.dtype}, {'x'.join(map(str, operand.shape)) or 'scalar'})"
        finite = " where it is finite" if operand.bad else ""
        if not operand.shape and operand.value is not None:
            words += f" is {operand.value:.4g}"
        elif operand.amax == 0.0:
            words += f" is 0{finite or ' throughout'}"
        else:
            words += f" runs from {short_number(operand.min)} to {short_number(operand.max)}{finite}"
            words += f" and is {short_number(operand.value)} there" if operand.value is not None else ""
        parts.append(words)
    return f"Operand{'s' if len(parts) > 1 else ''} {'; '.join(parts)}." if parts else ""


def reference_words(op: Op, cause: Cause) -> str:
    """A sentence: the result of the same op in FP64; empty if the log lacks it or the cause implies it."""
    reference = op.reference
    if reference is None:
        return ""
    if reference.bad and UNDERFLOWED in cause.why:
        return " These operands also divide by zero in FP64, but a wider format keeps them from 0."
    if reference.bad and cause.name == "optimizer-division-by-zero":
        keeps = ", but a wider format keeps eps from 0" if " is 0 in " in cause.why else ""
        keeps = ": a divisor that was rounded to 0 stays 0" if MAY_BE_ROUNDED in cause.why else keeps
        return f" These operands also divide by zero in FP64{keeps}."
    if reference.bad and ROUNDING_ERROR in cause.why:
        return " Computed in a wider format, its operand would not be negative."
    made = next((r.bad for r in op.results if r.bad), 0)
    if 0 < reference.bad < made:
        also = f" In FP64 {reference.bad:,} of these {made:,} elements are also non-finite"
        return f"{also}: a wider format alone does not help."
    if reference.bad:
        return " The result is also non-finite in FP64: no wider format would help."
    fmt = op.result_format
    if reference.amax is None or (fmt is not None and reference.amax <= fmt.max):
        return ""  # the cause then names an intermediate overflow
    if "in FP64 the result reaches" in cause.why:
        return ""
    return f" In FP64 the result is finite and reaches {reference.amax:.4g}: the format's range ended."


def made_origin(incident: Incident, op: Op) -> bool:
    """Whether a result of ``op`` has the size and format of the first non-finite tensor, so that it may be the same.

    The row of a module's output counts all calls of a step, recomputation included.
    """
    row = incident.origin.row if incident.origin is not None else None
    if row is None:
        return False
    called_again = row.kind == "output" and row.module == op.module
    sizes = [r.numel for r in op.results if r.dtype == row.dtype]
    return row.numel in sizes or (called_again and any(n and row.numel % n == 0 for n in sizes))


def _poison_words(incident: Incident) -> str:
    """A sentence: the buffers or optimizer state that the step poisoned, and when the loss showed it; may be empty."""
    culprit = incident.culprit
    replay = incident.poison or (culprit.replay if culprit is not None else None)
    if replay is None or not replay.poisoned:
        return ""
    first, more = replay.poisoned[0], and_more(len(replay.poisoned))
    what = "optimizer state" if replay.target == "optimizer-state" else "buffer"
    words = f" {what.capitalize()} `{first.full_name}`{more} holds {first.facts.count_words()} from this step on"
    if incident.shown_at is not None:
        return f"{words}; the loss or a gradient showed it at step {incident.shown_at}."
    if incident.poison is not None:
        return f"{words}, while loss and gradients stay finite; training does not mend it."
    return f"{words}; skipping the step does not mend it."


def _replay_words(replay: Replay) -> str:
    """Sentences on how far the replay differs from the run; empty if it is bit for bit the same."""
    words = " The replay gave the same kind of values; that they are equal bit for bit was not shown."
    words = "" if replay.reproduced == "bit-for-bit" else words
    if replay.changed_arguments:
        names = ", ".join(f"`{n}`" for n in replay.changed_arguments)
        words += f" The script changed the batch in place after the call ({names}), so the replay saw other values."
    if replay.phase == "optimizer" and replay.why:
        words += f" In the replay, {replay.why}."
    return words
