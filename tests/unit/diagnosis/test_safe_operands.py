"""Prescriptions against gradients of discarded values: they hold for every operand, not only at the pole."""

import re
from dataclasses import replace

import pytest
import torch

from precdoctor.diagnosis.analyses.op_facts import Op, Replay
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.claims.finding import Phase
from precdoctor.diagnosis.families.nonfinite.incident import Cause, Culprit
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import prescribe
from precdoctor.diagnosis.families.nonfinite.safe_operands import _SAFE, double_where

OPERANDS = (0.0, -0.0, 1e-45, 1e-40, 1e-38, 1.2e-38, 1e-30, 1e-19, 1e-6, 0.5, 1.0, -1.0, -1e-30)


def tensor(amax=1.0, *, bad=0):
    return Operand("self", "float32", (16,), 16, bad, 0, 0, 0, 0, 0.0, amax, amax, 0.1, None, None)


def op(index, name, *operands, makers=(), **more):
    where = {"phase": "forward", "node": None, "forward": None, **more}
    return Op(
        index=index,
        name=f"aten.{name}.default",
        root="",
        module=None,
        source=None,
        bad_in=(),
        bad_out=0,
        makers=makers,
        operands=operands,
        results=(tensor(bad=2),),
        reference=None,
        **where,
    )


def culprit(name, *earlier, incoming=1.0, cause="where-gradient-trap", makers=((0,),)):
    """The backward op of ``name``, or, without an incoming gradient, the forward op."""
    forward = op(5, name, tensor(), makers=makers)
    grad = tensor(0.0 if incoming is None else incoming)
    backward = op(9, "div", grad, phase="backward", node=f"{name.title()}Backward0", forward=5)
    at = forward if incoming is None else backward
    ops = {o.index: o for o in (*earlier, forward, backward)}
    replay = Replay("origin", at.phase, "", "bit-for-bit", 0, (at.index,), (at.index,), (), ops, None, "")
    return Culprit(at, replay=replay, phase=Phase.BACKWARD, cause=Cause(cause, 0.9, "why"))


@pytest.mark.parametrize("incoming", [1.0, 200.0])
@pytest.mark.parametrize("name", _SAFE)
def test_what_the_lines_to_paste_let_through_has_a_finite_gradient(name, incoming):
    found = double_where(culprit(name, incoming=incoming))
    x = torch.tensor(OPERANDS, requires_grad=True)
    scope = {"x": x, "a": torch.ones_like(x), "p": 0.5}
    exec(found.snippet, scope)
    (gradient,) = torch.autograd.grad(scope["y"], x, torch.full_like(x, incoming))

    assert gradient.isfinite().all() and scope["y"].isfinite().all()
    assert bool((gradient != 0).any())
    assert ("nonfinite_gradients" in found.predicted) == (name not in {"div", "pow"})


def test_no_promise_without_the_incoming_gradient():
    assert set(double_where(culprit("log", incoming=None)).predicted) == {"discarded_nonfinite_values"}
    assert set(double_where(culprit("special_fancy")).predicted) == {"nonfinite_derivatives"}


@pytest.mark.parametrize("cause", ["where-gradient-trap", "domain-edge-gradient", "log-of-nonpositive"])
@pytest.mark.parametrize(("maker", "name"), [("_softmax", "log_softmax"), ("sigmoid", "logsigmoid")])
def test_the_log_of_a_softmax_is_taken_of_its_logits(maker, name, cause):
    incoming = None if cause == "log-of-nonpositive" else 1.0
    made = op(2, maker, tensor())
    near = culprit("log", made, cause=cause, incoming=incoming, makers=((2,),))
    gathered = culprit(
        "log", made, op(3, "gather", makers=((2,), (1,))), cause=cause, incoming=incoming, makers=((3,),)
    )
    other = culprit("log", op(2, "relu", tensor()), cause=cause, incoming=incoming, makers=((2,),))

    for seen in (near, gathered):
        assert re.search(rf"\b{name}\b", prescribe(None, None, seen).title)
        assert f"F.{name}(logits" in prescribe(None, None, seen).snippet
    assert f"take {name}" not in prescribe(None, None, other).title
    assert f"take {name}" not in prescribe(None, None, culprit("log2", made, cause=cause, makers=((2,),))).title


def test_masked_logits_keep_the_log_of_their_softmax_infinite():
    masked = op(2, "_softmax", replace(tensor(), neg_inf=3))
    forward = culprit("log", masked, cause="log-of-nonpositive", incoming=None, makers=((2,),))

    assert prescribe(None, None, forward).title.startswith("clamp")
    assert "log_softmax" in prescribe(None, None, culprit("log", masked, makers=((2,),))).title
