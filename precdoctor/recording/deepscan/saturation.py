"""Detects gradients that end: flushed by an op of the backward pass, or stopped at the bound of a bounded function.

*Flush*: an op returns zeros where FP64 does not. *Closed*: the gradient behind a function does not pass it.

A tanh of 30 is 1 in every format, and its slope exactly zero; so is the slope of a clamp beyond its bounds. The measure
is the share of the arriving gradient that ends there. A softmax is at its bound if one probability is all that is left
of a row that had a choice: then changing its scores changes nothing. The diagonal of its derivative shows the distance:
1 - sum of squares, which is 1 - 1/n for n equal probabilities and 0 for a single one.

A loss that takes probabilities for logits normalises them again, and cannot reach its bound: they lie between 0 and 1.
A loss that takes probabilities for log-probabilities rewards them without their logarithm.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from precdoctor.numerics.nonfinite import op_names
from precdoctor.recording.deepscan.scan_facts import Event, Findings, op_reference
from precdoctor.recording.deepscan.scanned_op import Call, beside_channels
from precdoctor.recording.model import static

#: Backward ops of functions that are flat beyond a bound.
_FLAT = op_names("sigmoid_backward tanh_backward hardtanh_backward hardsigmoid_backward gelu_backward silu_backward")
#: The largest slope of functions that gates use, often near their bound; the share of it that counts as zero.
_SLOPES, _NO_SLOPE = {"sigmoid_backward": 0.25, "tanh_backward": 1.0}, 2.0**-14
#: Autograd nodes of clamps between numbers, whose backward pass is a ``where``. Clamps between tensors are left out:
#: reading the tensors that they saved may run the script's hooks.
_CLAMPS = frozenset(("ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0"))
#: Autograd nodes of functions that are flat everywhere.
_STEPS = {f"{name.title()}Backward{i}": name for name in ("round", "floor", "ceil", "trunc", "sign") for i in (0, 1)}
_SOFTMAX = op_names("_softmax _safe_softmax")
#: Losses that normalise their operand, with the function that they apply; and the ops of these functions.
_LOSSES = {"_log_softmax": "softmax", "binary_cross_entropy_with_logits": "sigmoid"}
_NORMALISING = {"_softmax": "softmax", "_safe_softmax": "softmax", "sigmoid": "sigmoid"}
#: Losses that read log-probabilities. ``kl_div`` is three ops: ``xlogy(target, target) - target * input``.
_OF_LOGARITHMS = op_names("nll_loss_forward nll_loss2d_forward")
_KL_ENTROPY, _KL_CROSS = "xlogy", "target * softmax"
#: Ops, beside views, that leave the values of their operand.
_PASSES = op_names("_to_copy clone")
#: Maximum number of normalised tensors remembered at a time.
_MAX_NORMALISED = 256
#: A fact is noted from these shares of the gradient and of channels on; the least number of elements or rows.
_NOTED, _CHANNELS, _LEAST = 0.5, 0.25, 8
#: A softmax is noted up to this median over rows of (1 - sum of squares), relative to equal probabilities.
_OPEN = 1.0 / 16
#: Scores below this are masks.
_MASKED = -9e3
#: Maximum number of scores that are read.
_MAX_SCORES = 1 << 20


#: A flush is noted from this share of a gradient's non-zero elements on. Maximum number of reruns per place.
_FLUSHED, _MAX_PER_PLACE = 0.25, 2


@dataclass(frozen=True)
class _Normalised:
    """What made a tensor: the function that normalises, or the term of ``kl_div``; and the op of that function."""

    function: str
    made_by: Event

    @property
    def facts(self) -> Event:
        return {"function": self.function, "made_by": self.made_by}


class Saturation:
    """Examines the ops of backward passes and each softmax of a forward pass."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._places: Counter[Any] = Counter()
        #: Normalised tensors, with the function that was applied and the op that did.
        self._normalised: static.ByIdentity[Tensor, _Normalised] = static.ByIdentity()

    def forward(self, call: Call) -> None:
        """Note a softmax at its bound, or probabilities given to a loss that expects something else."""
        self._note_renormalised(call)
        if call.plain_name not in _SOFTMAX or not call.results or not call.where.root or len(call.args) < 2:
            return
        scores, dim = call.args[0], call.args[1]
        if not scores.requires_grad or scores.dim() < 2 or scores.shape[dim] < 2:
            return
        scores, shares = scores.detach().movedim(dim, -1), call.results[0].detach().movedim(dim, -1)
        width = scores.shape[-1]
        scores, shares = (x.reshape(-1, width)[: max(1, _MAX_SCORES // width)] for x in (scores, shares))
        choices = (scores > _MASKED).sum(-1)
        chosen = choices > 1
        if int(chosen.sum()) < _LEAST:
            return
        even = 1.0 - choices[chosen].double().reciprocal()
        open_ = ((1.0 - shares[chosen].double().square().sum(-1)).clamp_min(0.0) / even).median()
        if not open_ <= _OPEN:
            return
        best = scores[chosen].topk(2, -1).values.double()
        data = {"function": "softmax", "open": float(open_), "of": int(chosen.sum()),
                "distance": float((best[:, 0] - best[:, 1]).median())}  # fmt: skip
        self._findings.add("closed", call, 1.0 - float(open_), **data)

    def _note_renormalised(self, call: Call) -> None:
        """Note a loss that reads a normalised tensor as logits or log-probabilities; remember normalised results."""
        given = call.args[0] if call.args else None
        if not isinstance(given, Tensor) or not call.results:
            return
        known = self._normalised.get(given)
        if known is not None and known.function == _LOSSES.get(call.plain_name):
            width = given.shape[call.args[1]] if known.function == "softmax" else 2
            self._findings.add("closed", call, 1.0, **known.facts, again=True, of=given.numel(), classes=width)
        elif known is not None and known.function == "softmax" and call.plain_name in _OF_LOGARITHMS:
            self._findings.add("closed", call, 1.0, **known.facts, without_log=True, of=given.numel())
        made = known if call.func.is_view or call.plain_name in _PASSES else None
        if made is None and (function := _NORMALISING.get(call.plain_name)) is not None:
            made = _Normalised(function, op_reference(call))
        if (made := made or self._kl_term(call, given)) is None:
            return
        self._normalised.put_if_room(call.results[0], made, _MAX_NORMALISED)

    def _kl_term(self, call: Call, given: Tensor) -> _Normalised | None:
        """Return which term of ``kl_div`` of a softmax the op makes; None for another op. Note their difference."""
        other = call.args[1] if len(call.args) > 1 else None
        if not isinstance(other, Tensor):
            return None
        if call.plain_name == "xlogy" and given is other:
            return _Normalised(_KL_ENTROPY, {})
        known = self._normalised.get(other)
        if known is None:
            return None
        if call.plain_name == "mul" and known.function == "softmax":
            return _Normalised(_KL_CROSS, known.made_by)
        if call.plain_name == "sub" and known.function == _KL_CROSS:
            entropy = self._normalised.get(given)
            if entropy is not None and entropy.function == _KL_ENTROPY:
                data = {"function": "softmax", "made_by": known.made_by, "loss": "kl_div", "of": given.numel()}
                self._findings.add("closed", call, 1.0, without_log=True, **data)
        return None

    def flushed(self, call: Call) -> None:
        """Note an op of the backward pass that has flushed much of a gradient in FP16."""
        result = call.results[0] if call.results else None
        if result is None or result.dtype != torch.float16 or call.func.is_view or call.swapped:
            return
        counts = call.counts(result)
        place = (call.where, call.op, tuple(result.shape))
        if counts is None or counts.bad or counts.zero < _FLUSHED * counts.numel:
            return
        if self._places[place] >= _MAX_PER_PLACE or all(c.zero == c.numel for c in call.operand_counts()):
            return
        self._places[place] += 1
        exact = call.exact
        if exact is None:
            return
        size = exact[0].abs()
        possible = torch.isfinite(size) & (size > 0)
        flushed = possible & (result.detach() == 0)
        many, of = int(flushed.sum()), int(possible.sum())
        if not of or many < _FLUSHED * of:
            return
        whole = float(size[possible].sum())
        lost = float(size[flushed].sum()) / whole if whole > 0 else 0.0
        data = {
            "dtype": "float16",
            "flushed": many,
            "of": of,
            "lost": lost,
            "channels": channels_hit(flushed, possible),
            "sqnr_db": _sqnr(result, exact[0], possible),
            "exact_amax": float(size[possible].max()),
            "exact_median": float(size[possible].median()),
        }
        self._findings.add("flush", call, lost, **data)

    def backward(self, call: Call) -> None:
        """Note a function whose backward op lets little of the gradient through."""
        step = _STEPS.get(_node_name()) if call.plain_name == "zeros_like" else None
        if call.plain_name not in _FLAT and step is None and not (call.plain_name == "where" and _is_of_clamp()):
            return
        result = call.results[0] if call.results else None
        counts = call.counts(result) if result is not None and not call.swapped else None
        near = call.plain_name in _SLOPES
        if result is None or counts is None or counts.bad or not (near or counts.zero >= _CHANNELS * counts.numel):
            return
        given = next((x for x in call.operands if x.shape == result.shape), None)
        exact = call.exact
        if given is None or (exact is None and call.plain_name != "where"):
            return
        size = given.detach().double().abs()
        possible = torch.isfinite(size) & (size > 0)
        closed = possible & (result.detach() == 0)
        if exact is not None and not call.plain_name.startswith(("gelu", "silu")):
            closed &= exact[0] == 0
        if near and exact is not None and 4 * int(closed.sum()) < int(possible.sum()):
            closed = possible & (exact[0].abs() <= _NO_SLOPE * _SLOPES[call.plain_name] * size)
        else:
            near = False
        many, of = int(closed.sum()), int(possible.sum())
        if of < _LEAST or not many:
            return
        lost, channels = float(size[closed].sum() / size[possible].sum()), channels_hit(closed, possible)
        if lost < _NOTED and channels < _CHANNELS:
            return
        name = step or ("clamp" if call.plain_name == "where" else call.plain_name.removesuffix("_backward"))
        data = {"function": name, "closed": many, "of": of, "lost": lost, "channels": channels, "near": near}
        self._findings.add("closed", call, max(lost, channels), **data)


def channels_hit(hit: Tensor, possible: Tensor) -> float:
    """Return the share of channels in which all that could be hit was; in the dimension with the largest share."""
    shares = [0.0]
    for others in beside_channels(hit):
        could = possible.sum(others)
        whole = (hit.sum(others) == could) & (could > 0)
        shares.append(float(whole.sum()) / max(int((could > 0).sum()), 1))
    return max(shares)


def _sqnr(seen: Tensor, exact: Tensor, kept: Tensor) -> float | None:
    """Return the SQNR of the bulk in dB: the median over elements of (exact / error)^2; None if most are exact."""
    size = exact[kept].abs()
    ratio = float(((seen.detach().double() - exact)[kept].abs() / size).median())
    return -20.0 * math.log10(ratio) if ratio > 0 else None


def _node_name() -> str:
    """Return the name of the running autograd node; empty if there is none."""
    node: Any = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


def _is_of_clamp() -> bool:
    """Return whether the gradient of a clamp is being computed, other than one bounded only below at zero: a ReLU."""
    node: Any = torch._C._current_autograd_node()
    if node is None or node.name() not in _CLAMPS:
        return False
    return not (getattr(node, "_saved_min", None) == 0 and getattr(node, "_saved_max", None) is None)
