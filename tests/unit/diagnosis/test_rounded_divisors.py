"""A divisor that a narrow format rounded to 0, and a target of logarithms: neither is mended by a constant."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from precdoctor.diagnosis.analyses.op_facts import NAN, POS_INF
from precdoctor.diagnosis.claims.finding import Phase, Source
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_op, op_cause, rounded_divisor
from precdoctor.diagnosis.families.nonfinite.incident import Culprit
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import prescribe
from precdoctor.diagnosis.families.nonfinite.op_report import reference_words
from tests.unit.diagnosis.test_op_causes import op, replay, tensor

STEP = SimpleNamespace(poison=None, last_finite=None, step=0)


def division(dtype: str, made: str) -> Culprit:
    """An optimizer's moment, divided by a number of this dtype that is 0."""
    divisor = replace(tensor("other", zero=1, dtype=dtype), numel=1, amax=0.0, min=0.0, negative=0)
    maker = op(4, made, tensor(dtype=dtype), phase="optimizer")
    divided = op(5, "aten.div.Tensor", tensor(), divisor, phase="optimizer", makers=((3,), (4,)), bad_out=POS_INF)
    divided = replace(divided, reference=replace(tensor("out"), pos_inf=1), source=Source("train.py", 19))
    seen = replay("optimizer", maker, divided)
    blamed = culprit_op(seen)
    assert blamed is not None
    cause = rounded_divisor(seen, blamed.op, op_cause(seen, blamed, None))
    return Culprit(**vars(blamed), replay=seen, phase=Phase.OPTIMIZER, cause=cause)


@pytest.mark.parametrize(
    ("dtype", "made", "rounded"),
    [
        ("bfloat16", "aten.rsub.Scalar", True),
        ("float16", "aten.rsub.Scalar", True),
        ("float32", "aten.rsub.Scalar", False),
        ("bfloat16", "aten.linalg_vector_norm.default", False),
    ],
)
def test_a_divisor_in_a_narrow_format_is_to_be_computed_in_float32(dtype: str, made: str, rounded: bool) -> None:
    culprit = division(dtype, made)
    assert culprit.cause.name == "optimizer-division-by-zero"
    assert (f"in {dtype}, which may have rounded it to 0" in culprit.cause.why) is rounded
    assert ("was rounded to 0 stays 0" in reference_words(culprit.op, culprit.cause)) is rounded
    advice = prescribe(None, STEP, culprit)
    assert ("compute the divisor of div at train.py:19 in FP32" in advice.title) is rounded
    assert ("nonfinite_elements" in advice.predicted) is not rounded
    assert "eps" not in advice.change, "it is no setting of the optimizer"
    if rounded:
        before = 2.0**-9 if dtype == "bfloat16" else 2.0**-12
        assert advice.predicted["half_ulp_below_1"] == {"from": before, "to": 2.0**-25}


@pytest.mark.parametrize(
    ("code", "module_class", "negative", "zero", "log_target"),
    [
        ("loss = F.kl_div(logp, t.log_softmax(-1))", "Net", 16, 0, True),
        ("loss = F.kl_div(logp, t.log_softmax(-1))", "Net", 15, 1, True),
        ("loss = F.kl_div(logp, t)", "Net", 7, 0, False),
        ("loss = F.kl_div(logp, t)", "Net", 0, 16, False),
        ("loss = self.criterion(logp, t)", "KLDivLoss", 16, 0, True),
        ("loss = torch.xlogy(t, t)", "Net", 16, 0, False),
    ],
)
def test_a_target_of_logarithms(code: str, module_class: str, negative: int, zero: int, log_target: bool) -> None:
    target = replace(tensor("other"), negative=negative, zero=zero, min=-6.9, max=-0.2)
    both = replace(target, argument="self"), target
    made = replace(op(3, "aten.xlogy.Tensor", *both, bad_out=NAN), source=Source("train.py", 8, code))
    seen = replay("forward", made)
    blamed = culprit_op(seen)
    assert blamed is not None
    view = SimpleNamespace(module_classes={("Net#0", "front"): module_class})
    cause = op_cause(seen, blamed, None)
    advice = prescribe(view, STEP, Culprit(**vars(blamed), replay=seen, phase=Phase.LOSS, cause=cause))
    assert ("log_target" in advice.change) is log_target
    assert ("pass log_target=True to kl_div at train.py:8" in advice.title) is log_target
