"""Bounded functions at their bound: what arrives behind them does not get through to the units before them.

A tanh of 30 is 1 in every format and its slope exactly zero; so is what a clamp cuts off. Judged is the gradient: the
share of what arrives that ends there. A softmax is at its bound where one probability is all there is of a row that had
a choice: then a change of its scores changes nothing. The diagonal of its derivative says how far it is from there:
1 - sum of squares, which is 1 - 1/n for n equal probabilities and 0 for a single one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precdoctor.recording.deepscan.op_audit import channels_hit
from precdoctor.recording.deepscan.scan_facts import Findings
from precdoctor.recording.deepscan.scanned_op import Call, names

#: Backward ops of functions that are flat beyond a bound; and of those that are flat for good where FP64 says so too.
_FLAT = names("sigmoid_backward tanh_backward hardtanh_backward hardsigmoid_backward gelu_backward silu_backward")
#: Autograd nodes of clamps between numbers, whose backward pass is a ``where``. Those between tensors save them, and to
#: unpack these may run the script's hooks.
_CLAMPS = frozenset(("ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0"))
#: Autograd nodes of functions that are flat everywhere.
_STEPS = {f"{name.title()}Backward{i}": name for name in ("round", "floor", "ceil", "trunc", "sign") for i in (0, 1)}
_SOFTMAX = names("_softmax _safe_softmax")
#: Shares of what arrives and of channels from which on a fact is noted, and the least number of elements or rows.
_NOTED, _CHANNELS, _LEAST = 0.5, 0.25, 8
#: 1 - sum of squares of the median row, beside that of equal probabilities: from here on a softmax is noted.
_OPEN = 1.0 / 16
#: Scores below are masks.
_MASKED = -9e3
#: Elements of scores that are looked at.
_MAX_SCORES = 1 << 20


class Saturation:
    """Looks at the backward passes of bounded functions, and at each softmax of a forward pass."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def forward(self, call: Call) -> None:
        """An op of a module has run."""
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

    def backward(self, call: Call) -> None:
        """An op of the backward pass has run."""
        step = _STEPS.get(_node_name()) if call.plain_name == "zeros_like" else None
        if call.plain_name not in _FLAT and step is None and not (call.plain_name == "where" and _is_of_clamp()):
            return
        result = call.results[0] if call.results else None
        counts = call.counts(result) if result is not None and not call.swapped else None
        if result is None or counts is None or counts.bad or counts.zero < _CHANNELS * counts.numel:
            return
        given = next((x for x in call.operands if x.shape == result.shape), None)
        exact = call.exact()
        if given is None or (exact is None and call.plain_name != "where"):
            return
        size = given.detach().double().abs()
        possible = torch.isfinite(size) & (size > 0)
        closed = possible & (result.detach() == 0)
        if exact is not None and not call.plain_name.startswith(("gelu", "silu")):
            closed &= exact[0] == 0
        many, of = int(closed.sum()), int(possible.sum())
        if of < _LEAST or not many:
            return
        lost, channels = _share(size, closed, possible), channels_hit(closed, possible)
        if lost < _NOTED and channels < _CHANNELS:
            return
        name = step or ("clamp" if call.plain_name == "where" else call.plain_name.removesuffix("_backward"))
        data = {"function": name, "closed": many, "of": of, "lost": lost, "channels": channels}
        self._findings.add("closed", call, max(lost, channels), **data)


def _share(size: Tensor, hit: Tensor, possible: Tensor) -> float:
    """Of the sum of magnitudes."""
    return float(size[hit].sum() / size[possible].sum())


def _node_name() -> str:
    node: Any = torch._C._current_autograd_node()
    return node.name() if node is not None else ""


def _is_of_clamp() -> bool:
    """Whether the gradient of a clamp is computed; one that ends at zero on one side alone is a ReLU."""
    node: Any = torch._C._current_autograd_node()
    if node is None or node.name() not in _CLAMPS:
        return False
    return not (getattr(node, "_saved_min", None) == 0 and getattr(node, "_saved_max", None) is None)
