"""Prescriptions against gradients of discarded values, and against logs of probabilities that round to 0.

A mask keeps a gradient finite only if it leaves out every operand whose derivative overflows, not only the pole: the
derivative of ``log`` at a subnormal number exceeds the largest one of the format.
"""

from __future__ import annotations

import math

from precdoctor.diagnosis.analyses.op_facts import Op
from precdoctor.diagnosis.claims.finding import Prescription, at_line
from precdoctor.diagnosis.families.nonfinite.domain_prescriptions import bound_operand
from precdoctor.diagnosis.families.nonfinite.incident import Culprit

_TINY = "torch.finfo(x.dtype).tiny"
#: By op: the operands with a finite derivative, an operand to compute with in place of others, and the call.
_SAFE = {
    **dict.fromkeys(("log", "log2", "log10"), (f"x >= {_TINY}", "ones", "torch.{name}(safe)")),
    "sqrt": ("x > 0", "ones", "torch.sqrt(safe)"),
    "rsqrt": (f"x >= {_TINY} ** (2 / 3)", "ones", "torch.rsqrt(safe)"),
    "reciprocal": (f"x.abs() >= {_TINY} ** 0.5", "ones", "1 / safe"),
    "div": (f"x.abs() >= {_TINY} ** 0.5", "ones", "a / safe"),
    "pow": (f"x >= {_TINY}", "ones", "safe ** p"),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), ("x.abs() < 1", "zeros", "torch.{name}(safe)")),
}
#: Ops whose derivative depends on more than ``x``, so that its size is unknown.
_OF_TWO = ("div", "pow")
#: Largest incoming gradient whose product with 1 / tiny is in range: in IEEE formats the maximum is almost 4 / tiny.
_LARGEST_GRADIENT = 2.0
#: The function of logits that is the log of a function of them, and the loss that needs neither.
_LOGS_OF = {
    "_softmax": ("softmax", "F.log_softmax(logits, dim={dim})", "F.cross_entropy"),
    "softmax": ("softmax", "F.log_softmax(logits, dim={dim})", "F.cross_entropy"),
    "sigmoid": ("sigmoid", "F.logsigmoid(logits)", "F.binary_cross_entropy_with_logits"),
}
_MOVING = ("_to_copy", "clone", "contiguous", "gather", "index", "index_select", "select", "slice", "cat", "stack")
#: Maximum number of ops between the log and what made the probabilities.
_DEPTH = 4


def log_of_logits(culprit: Culprit) -> Prescription | None:
    """Take ``log_softmax`` or ``logsigmoid`` of logits, if the culprit is the log of their softmax or sigmoid."""
    log = culprit.function
    maker = _probabilities(culprit, log) if log is not None and log.short == "log" else None
    if maker is None:
        return None
    made, call, loss = _LOGS_OF[maker.short]
    call = call.format(dim=maker.settings.get("dim", -1))
    name, backward = call[2:].partition("(")[0], culprit.op.phase == "backward"
    what = "nonfinite_gradients" if backward else "nonfinite_elements"
    return Prescription(
        title=f"take {name} of the logits in place of log{culprit.at_line} of {made}{at_line(maker.source)}: "
        "it stays finite where a probability rounds to 0",
        change={"op": {"from": f"log of {made}", "to": name}, "module": culprit.op.module},
        predicted={what: {"from": culprit.bad_elements, "to": 0}},
        snippet=f"import torch.nn.functional as F\n\nlogp = {call}  # {loss} of the logits needs no log at all\n",
    )


def double_where(culprit: Culprit) -> Prescription:
    """Make the operand safe before the function, not only its result after it."""
    if (better := bound_operand(culprit) or log_of_logits(culprit)) is not None:
        return better
    name = culprit.function_name
    valid, filled, call = _SAFE.get(name, ("f_and_its_derivative_are_finite(x)", "ones", "f(safe)"))
    incoming = _incoming(culprit)
    if incoming is not None and incoming > _LARGEST_GRADIENT:
        valid = valid.replace(_TINY, f"({math.ceil(incoming)} * {_TINY})")
    certain = incoming is not None and name in _SAFE and name not in _OF_TWO
    uncertain = "nonfinite_derivatives" if culprit.op.phase == "backward" else "discarded_nonfinite_values"
    what = "nonfinite_gradients" if certain else uncertain
    return Prescription(
        title=f"make the operand safe before the function, not only its result after it{culprit.at_line}",
        change={"module": culprit.op.module, "pattern": "double where"},
        predicted={what: {"from": culprit.bad_elements, "to": 0}},
        snippet=(
            "import torch\n\n"
            f"valid = {valid}  # where the derivative of {name} is in range\n"
            f"safe = torch.where(valid, x, torch.{filled}_like(x))  # 0 * inf is NaN\n"
            f"y = torch.where(valid, {call.format(name=name)}, torch.zeros_like(x))\n"
        ),
    )


def _incoming(culprit: Culprit) -> float | None:
    """The largest gradient that came in to the derivative of the function; None if unknown."""
    first = culprit.op.first_operand
    return first.amax if culprit.op.phase == "backward" and first is not None and not first.bad else None


def _probabilities(culprit: Culprit, log: Op) -> Op | None:
    """The softmax or sigmoid that made the operand of ``log``; None for other makers.

    A forward result stays -inf if a logit is; then, or if the logits are unknown, it is also None.
    """
    at: Op | None = log
    for _ in range(_DEPTH):
        made_by = at.makers[0] if at is not None and at.makers else ()
        index = next((i for i in made_by if isinstance(i, int)), None)
        at = culprit.replay.ops.get(index) if index is not None and len(made_by) == 1 else None
        if at is None or at.short not in (*_LOGS_OF, *_MOVING):
            return None
        if at.short in _LOGS_OF:
            logits = at.first_operand
            finite = logits is not None and not logits.bad
            return at if at.phase == "forward" and (finite or culprit.op.phase == "backward") else None
    return None
