"""Finds the culprit of a replayed incident: the op, the phase it belongs to, and the cause.

The ops come from ``survey.op_facts``; :mod:`.incident_search` and :mod:`.bad_steps` ask for the culprit of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from precdoctor.diagnosis.analyses.op_facts import NAN, NEG_INF, POS_INF, BadSetting, Op, Replay, reader_of
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.analyses.origin import class_of, is_loss_module
from precdoctor.diagnosis.analyses.replays import replay_at
from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.families.nonfinite.arithmetic_causes import (
    MAY_BE_ROUNDED,
    SOFTMAXES,
    UNDERFLOWED,
    arithmetic_cause,
    is_norm,
    scalar_cause,
)
from precdoctor.diagnosis.families.nonfinite.gradient_causes import discarded_value_cause, gradient_cause
from precdoctor.diagnosis.families.nonfinite.incident import MAY_BE_NONFINITE, Cause, Culprit, CulpritOp
from precdoctor.diagnosis.families.nonfinite.tensor_causes import data_cause
from precdoctor.diagnosis.survey.rows import known_format, number
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.numerics.formats import FP32
from precdoctor.numerics.nonfinite import FILLS, can_make, op_names

#: Kind of an external tensor whose maker the replay did not see.
_UNKNOWN_KIND = "unknown"
#: Ops whose NaN is a constant in the code, or in that of the function of torch's that it calls.
_CONSTANTS = FILLS - op_names("where masked_scatter triu tril")
#: Ops that compute with numbers, so that their ``-inf`` operand is no mask: masks are added, compared and normalised.
_ARITHMETIC = op_names(
    "mm addmm bmm mv addmv dot linear mkldnn_linear convolution _convolution mkldnn_convolution cudnn_convolution "
    "native_layer_norm native_batch_norm native_group_norm _native_batch_norm_legit mul div exp log sqrt square pow"
)
#: Names of optimizer state whose root, plus eps, divides the update.
_SECOND_MOMENTS = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "v")
#: Causes that become ``optimizer-overflow`` inside an optimizer step.
_OVERFLOWS = ("matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow", "exp-overflow", "other")


def culprit_at(view: RunView, process: Process, step: int) -> Culprit | None:
    """The culprit of a step; None if the step was not replayed, or if the replay does not decide on an op."""
    replay = replay_at(view, process, step)
    at = culprit_op(replay) if replay is not None and replay.outcome == "origin" else None
    if replay is None or at is None:
        return None
    cause = op_cause(replay, at, gradient_scale(view, process, step))
    if cause.name == "optimizer-division-by-zero" and not at.op.name.startswith("optim."):
        flushed = next((words for o in at.op.operands if (words := flushed_eps(view, o.dtype))), "")
        cause = replace(cause, why=f"{cause.why}; {flushed}") if flushed else rounded_divisor(replay, at.op, cause)
    culprit = Culprit(**vars(at), replay=replay, phase=culprit_phase(view, replay, at), cause=cause)
    if cause.name == "nonfinite-input-batch":
        return replace(culprit, cause=data_cause(replay, culprit.data, cause.why))
    return culprit


def rounded_divisor(replay: Replay, op: Op, cause: Cause) -> Cause:
    """Add to the cause of a division by zero that a format narrower than FP32 may have rounded its divisor to 0.

    The cause stays as it is if the divisor is a norm, or if it is known what made the divisor 0.
    """
    divisor = op.divisor
    fmt = known_format(divisor.dtype) if divisor is not None else None
    if divisor is None or fmt is None or not divisor.zero or UNDERFLOWED in cause.why:
        return cause
    if fmt.mantissa_bits >= FP32.mantissa_bits or is_norm(replay, op, divisor):
        return cause
    why = f"the divisor holds {plural(divisor.zero, 'exact zero')} in {fmt.dtype}, which {MAY_BE_ROUNDED}"
    return replace(cause, why=why)


def flushed_eps(view: RunView, dtype: str) -> str:
    """``eps 1e-08 is 0 in float16``, for the smallest ``eps`` of an optimizer; empty if the format holds them all."""
    fmt = known_format(dtype)
    all_eps = (number(group.get("eps")) for o in view.optimizers for group in o.get("groups") or ())
    flushed = [eps for eps in all_eps if fmt is not None and eps is not None and 0.0 < eps <= fmt.flush_limit]
    return f"eps {min(flushed):g} is 0 in {dtype}" if flushed else ""


def gradient_scale(view: RunView, process: Process, step: int) -> float | None:
    """The loss scale that the gradients of a step contain; None without one.

    A step without a backward pass uses the gradients of the step before, and so its scale.
    """
    facts = view.step_facts(process, step)
    while facts is not None and facts.loss_scale is None and not facts.micro_steps:
        facts = view.step_facts(process, facts.step - 1)
    return facts.loss_scale if facts is not None else None


# -- the op -----------------------------------------------------------------------------------------------------------


def culprit_op(replay: Replay) -> CulpritOp | None:
    """The first op in order of execution that made a non-finite value of finite operands, or read an external one.

    Masks are not counted. None if a value of unknown origin came in at or before that op, so that it may not be first.
    """
    candidates = [candidate for i in replay.origins if (candidate := _op_candidate(replay, replay.ops[i])) is not None]
    for kind, name, index in replay.externals:
        if kind != _UNKNOWN_KIND and (op := replay.ops.get(index)) is not None:
            candidate = _external_candidate(replay, op, (kind, name))
            candidates += [candidate] if candidate is not None else []
    harmful = [candidate for candidate in candidates if not _does_no_harm(replay, candidate)]
    first = min(harmful or candidates, key=lambda candidate: candidate.op.index, default=None)
    if first is None or min(_undecided(replay), default=math.inf) <= first.op.index:
        return None
    return None if first.external is None and _only_passes_on(first.op) else first


def _does_no_harm(replay: Replay, at: CulpritOp) -> bool:
    """Whether an op made ``-inf`` alone, in FP64 too (``log`` of a mask), and no other op made worse of it."""
    meant = at.op.bad_out == NEG_INF and not at.op.finite_in_fp64
    own = at.external is None and at.mask is None
    return own and meant and _turning_point(replay, at.op.index) is None


def _undecided(replay: Replay) -> list[int]:
    """The indices of ops that may only have passed a non-finite value on, because the replay lacks what they read."""
    unknown = [index for kind, _, index in replay.externals if kind == _UNKNOWN_KIND]
    return unknown + [i for i in replay.origins if _only_passes_on(replay.ops[i])]


def first_seen(view: RunView, process: Process, step: int) -> Op | None:
    """The op of a step whose result is the first that the replay knows to be non-finite, where none is the culprit.

    It made the value, or read it from code that the replay does not reach. None if the op's line is not in the log.
    """
    replay = replay_at(view, process, step)
    if replay is None or replay.outcome != "origin" or culprit_op(replay) is not None:
        return None
    op = replay.ops.get(min(_undecided(replay), default=-1))
    return op if op is not None and op.source is not None else None


def _only_passes_on(op: Op) -> bool:
    """Whether no finite operand gives the op's result, so that it only passed a value on (``exp`` makes no NaN)."""
    real = not any(r.dtype.startswith("complex") for r in (*op.operands, *op.results))
    return op.phase == "forward" and real and not can_make(op.short, op.bad_out)


def _op_candidate(replay: Replay, op: Op) -> CulpritOp | None:
    """The candidate for an op that made a non-finite value: that op itself.

    For an intended infinity, the op that turned it into something worse. If none did, None for a ``-inf`` mask, and the
    op itself for +Inf.
    """
    if op.bad_out == NEG_INF and op.short in FILLS:
        harmed = _turning_point(replay, op.index)
        return CulpritOp(harmed, mask=op) if harmed is not None else None
    if op.bad_out and not op.bad_out & NAN and op.short in FILLS and not op.finite_in_fp64:
        harmed = _first_nan(replay, op.index)  # +Inf is an intended constant ("no path yet", "outside")
        return CulpritOp(harmed, mask=op) if harmed is not None else CulpritOp(op)
    return CulpritOp(op)


def _external_candidate(replay: Replay, op: Op, external: tuple[str, str]) -> CulpritOp | None:
    """The candidate for a tensor that was non-finite before the step; ``op`` was the first to read it.

    None for a mask or a literal infinity that does no harm. A ``-inf`` argument of a call is a candidate all the same.
    """
    bad_in = [b for b, maker in zip(op.bad_in, op.makers, strict=False) if maker == external]
    masked = bool(bad_in) and all(k == NEG_INF for k in bad_in)
    if external[0] == "literal":
        harmed = op if op.bad_out & NAN else _first_nan(replay, op.index)
        return CulpritOp(harmed, mask=external) if harmed is not None else None
    if external[0] == "argument" and masked:
        # +Inf as well if a loss makes it; a model may negate its mask.
        of_loss = not replay.root or is_loss_module(replay.root, "", "")
        harmed = (_turning_point if of_loss else _first_nan)(replay, op.index - 1)
        return CulpritOp(harmed, mask=external) if harmed is not None else CulpritOp(op, external=external)
    if external[0] != "argument" and masked and not (_is_worse_than_mask(op) and op.short in _ARITHMETIC):
        harmed = op if _is_worse_than_mask(op) else _turning_point(replay, op.index)
        return CulpritOp(harmed, mask=external) if harmed is not None else None
    return CulpritOp(op, external=external)


def _turning_point(replay: Replay, after: int) -> Op | None:
    """The first op after index ``after`` that turns a mask into NaN or +Inf, or is a ``logsumexp`` of masks only.

    None if no later op makes more than ``-inf`` of operands with nothing worse: a mask that meets a NaN, or an infinity
    from elsewhere, is not the cause.
    """
    later = [replay.ops[i] for i in replay.path if i > after]
    if not any(map(_harmed_by_mask, later)):
        return None
    return next(op for op in later if _harmed_by_mask(op) or (op.short == "logsumexp" and op.bad_out))


def _first_nan(replay: Replay, after: int) -> Op | None:
    """The first op after index ``after`` that made a NaN of infinities; None if none did."""
    later = (replay.ops[i] for i in replay.path if i > after)
    made = (op for op in later if op.bad_out & NAN and any(op.bad_in))
    return next((op for op in made if not any(bad & NAN for bad in op.bad_in)), None)


def _is_worse_than_mask(op: Op) -> bool:
    """Whether a result of the op holds NaN or +Inf, so that it is no mask."""
    return bool(op.bad_out & (NAN | POS_INF))


def _harmed_by_mask(op: Op) -> bool:
    """Whether the op made NaN or +Inf of ``-inf``, and read nothing worse."""
    return _is_worse_than_mask(op) and any(op.bad_in) and all(bad in (0, NEG_INF) for bad in op.bad_in)


def culprit_phase(view: RunView, replay: Replay, at: CulpritOp) -> Phase:
    """The phase to mend: the op's, or, if the op only read an external tensor, the phase that made that tensor."""
    if replay.phase == "optimizer":
        return Phase.OPTIMIZER
    if at.of_target or at.delivered(replay.bad_data):
        return Phase.DATA
    if at.external is None and reader_of(replay, at.op):
        return Phase.FORWARD
    of_loss = not replay.root or is_loss_module(replay.root, "", "")
    if at.external is not None:
        origins = {"batch": Phase.DATA, "weight": Phase.OPTIMIZER, "buffer": Phase.OPTIMIZER}
        return origins.get(at.external[0], Phase.LOSS if of_loss else Phase.FORWARD)
    if replay.phase == "backward" and at.mask is None:
        return Phase.BACKWARD  # with a mask the culprit is a forward op whose result the loss discarded
    module = at.op.module or ""
    of_loss = of_loss or is_loss_module(replay.root, module, class_of(view.module_classes, replay.root, module))
    return Phase.LOSS if of_loss else Phase.FORWARD


# -- the cause --------------------------------------------------------------------------------------------------------


def op_cause(replay: Replay, at: CulpritOp, loss_scale: float | None) -> Cause:
    """The cause of a culprit op, from the vocabulary of findings; ``other`` if no name fits."""
    op = at.op
    if replay.phase == "optimizer":
        return _settings_cause(op, replay.bad_settings) or _optimizer_cause(replay, op)
    if at.external is not None:
        if at.delivered(replay.bad_data) and not at.of_target:
            return Cause("nonfinite-input-batch", 0.9, f"{op.short} read data that held non-finite values")
        return _external_cause(op, at.external, of_target=at.of_target, live=replay.live)
    if at.mask is not None:
        return _mask_cause(op)
    if replay.phase == "backward" and op.phase != "backward":
        return discarded_value_cause(replay, op)
    cause = gradient_cause(replay, op, loss_scale) if op.phase == "backward" else None
    cause = cause or arithmetic_cause(replay, op)
    if cause is not None:
        return cause
    if op.short in _CONSTANTS and op.bad_out & NAN:
        where = "the line writes NaN out, or calls a function that returns it where it is not defined (`logdet`)"
        return Cause("other", 0.8, f"{op.short} fills in the constant NaN: {where}")
    if op.operands and not op.unknown:
        return Cause("other", 0.5, f"{op.name} made it of finite operands")
    which = op.lacking if op.operands else "its operands"
    return Cause("other", 0.4, f"{op.name} returned it; the log lacks {which}, {MAY_BE_NONFINITE}")


def _external_cause(op: Op, external: tuple[str, str], *, of_target: bool, live: bool) -> Cause:
    """The cause if the op read a tensor that was non-finite before the step; unnamed for tensors made by other code."""
    kind, name = external
    if of_target:
        return Cause("nonfinite-input-batch", 0.9, f"the target of {op.short} held non-finite values")
    if kind == "batch":
        why = f"argument `{name}` held non-finite values when the model was called"
        return Cause("nonfinite-input-batch", 0.97, why)
    if kind == "argument":
        return Cause(None, 0.9, f"code between two top-level modules made argument `{name}`")
    if kind == "computed":
        return Cause(None, 0.9, f"code before this call, in the same step, computed weight `{name}` from other weights")
    if not name:  # made before the op that reads it, by code that leaves no autograd graph
        made = "outside of the trace" if live else "without a gradient"
        return Cause(None, 0.9, f"a tensor that {op.short} reads was made {made}, and non-finite")
    what = kind if kind in ("weight", "buffer") else "tensor"
    return Cause("nonfinite-weights", 0.95, f"the {what} `{name}` was non-finite before the step's forward pass")


def _mask_cause(op: Op) -> Cause:
    if op.short in SOFTMAXES or "attention" in op.short:
        return Cause("softmax-fully-masked", 0.95, "a row of its input holds nothing but -inf")
    if op.short in {"mul", "mm", "bmm", "addmm", "baddbmm"}:
        return Cause("zero-times-inf", 0.9, "a zero met an intended infinity")
    if op.short in {"add", "sub", "sum", "mean"} and op.bad_out & NAN:
        return Cause("inf-minus-inf", 0.9, "intended infinities cancelled")
    if op.short.startswith("nll_loss"):
        return Cause("other", 0.9, "the target of a sample is a class that is masked: its probability is 0")
    summed = "a sum over all classes (label smoothing, an entropy) must leave those out that are masked"
    return Cause("other", 0.8, f"{op.name} turned an intended -inf into something worse; {summed}")


# -- the cause in an optimizer step -----------------------------------------------------------------------------------


def _settings_cause(op: Op, settings: Sequence[BadSetting]) -> Cause | None:
    """The cause (``other``) if a hyper-parameter, or a number passed to an op inside the step, is NaN or infinite.

    None if the gradient is also non-finite, or if all of them are finite.
    """
    if (gradient := op.operand("grad")) is not None and gradient.bad:
        return None
    if settings:
        same_name = [s for s in settings if s.name == settings[0].name]
        return Cause("other", 0.97, f"{settings_words(same_name)}, and so is every weight that it is multiplied with")
    return None if op.name.startswith("optim.") else scalar_cause(op)


def settings_words(settings: Sequence[BadSetting]) -> str:
    """``the learning rate of parameter group 0 (and of group 1) is NaN``; all ``settings`` have the same name."""
    first = settings[0]
    more = f" (and of group{'s' if len(settings) > 2 else ''} {', '.join(str(s.group) for s in settings[1:])})"
    return f"{first.words}{more if len(settings) > 1 else ''} is {first.is_words}"


def _optimizer_cause(replay: Replay, op: Op) -> Cause:
    """The cause in an optimizer step: from one parameter's facts if the op is the whole step, else from the op inside.

    An overflow inside a step is always ``optimizer-overflow``.
    """
    if op.name.startswith("optim."):
        return _step_cause(op)
    cause = arithmetic_cause(replay, op)
    by_zero = op.settings.get("other") == 0 or any(o.zero for o in op.operands)
    if cause is None or cause.name in _OVERFLOWS or (cause.name == "division-by-zero" and not by_zero):
        reach = op.reference.amax if op.reference is not None else None
        exact = f": in FP64 the result reaches {reach:.4g}" if reach is not None else ""
        return Cause("optimizer-overflow", 0.9, f"{op.short} left the range of its format{exact}")
    if cause.name == "division-by-zero":
        return Cause("optimizer-division-by-zero", cause.confidence, cause.why)
    return cause


def _step_cause(op: Op) -> Cause:
    """The cause of one non-finite parameter, from its gradient, its state and the settings."""
    bad_state = next((o for o in op.operands if o.bad and o.argument not in {"weight", "grad"}), None)
    if (gradient := op.operand("grad")) is not None and gradient.bad:
        words = f"after the step the gradient holds {gradient.count_words()}"
        return Cause("other", 0.5, f"{words}: a closure recomputed it, or the step wrote to it")
    if (weight := op.operand("weight")) is not None and weight.bad:
        return Cause("nonfinite-weights", 0.9, "the weight was non-finite before the step")
    if bad_state is not None and not bad_state.nan:
        return Cause("optimizer-overflow", 0.95, _overflow_words(op, bad_state))
    divisor = next((o for name in _SECOND_MOMENTS if (o := op.operand(name)) is not None), None)
    if divisor is not None and (words := _zero_divisor_words(op, divisor)):
        return Cause("optimizer-division-by-zero", 0.95, words)
    if bad_state is not None:
        return Cause("optimizer-overflow", 0.7, _overflow_words(op, bad_state))
    rate = op.settings.get("lr")
    words = f": the learning rate is {rate:g}" if isinstance(rate, (int, float)) and math.isfinite(rate) else ""
    return Cause("optimizer-overflow", 0.8, f"the update left the range of the weight{words}")


def _zero_divisor_words(op: Op, divisor: Operand) -> str:
    """Why the divisor, the root of a second moment plus eps, is zero; empty if it is not."""
    eps, fmt = op.settings.get("eps"), known_format(divisor.dtype)
    has_eps = isinstance(eps, (int, float))
    flushed = isinstance(eps, (int, float)) and fmt is not None and 0.0 < eps <= fmt.flush_limit
    zero_there = divisor.value == 0.0 if divisor.value is not None else divisor.zero > 0
    if not zero_there or (has_eps and eps != 0 and not flushed):
        return ""
    reason = f"eps {eps:g} is 0 in {divisor.dtype}" if flushed else "eps is 0"
    return f"`{divisor.argument}` holds {plural(divisor.zero, 'exact zero')} ({divisor.dtype}) and {reason}"


def _overflow_words(op: Op, state: Operand) -> str:
    gradient = op.operand("grad")
    reach = f" from gradients up to {gradient.amax:.4g}" if gradient is not None and gradient.amax is not None else ""
    fmt = known_format(state.dtype)
    limit = f", whose range ends at {fmt.max:.6g}" if fmt is not None else ""
    return f"state `{state.argument}` ({state.dtype}{limit}) holds {state.count_words()}{reach}"
