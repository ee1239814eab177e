"""Causes told from the facts of one op, where the op's name alone would mislead."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from precdoctor.diagnosis.analyses.bad_data import BadTensor
from precdoctor.diagnosis.analyses.op_facts import NAN, NEG_INF, POS_INF, BadSetting, Op, Replay
from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.claims.finding import Phase, Source
from precdoctor.diagnosis.families.nonfinite.culprit import culprit_op, culprit_phase, gradient_scale, op_cause
from precdoctor.diagnosis.families.nonfinite.incident import Cause, Culprit, CulpritOp
from precdoctor.diagnosis.families.nonfinite.op_prescriptions import library_words, prescribe
from precdoctor.diagnosis.families.nonfinite.op_report import (
    external_words,
    made_origin,
    operand_words,
    reference_words,
)

CONSTANT = ("constant", "")


def tensor(argument="self", *, nan=0, zero=0, dtype="float32"):
    """Sixteen numbers between -1 and 1."""
    return Operand(argument, dtype, (16,), 16, nan, 0, 0, zero, 7, -1.0, 1.0, 1.0, 0.1, None, 0.0 if zero else None)


def op(index, name, *operands, phase="forward", node=None, forward=None, bad_out=0, makers=(), settings=None):
    bad_in = tuple(NAN if o.nan else 0 for o in operands)
    return Op(
        index=index,
        name=name,
        phase=phase,
        root="Net#0",
        module="front",
        source=None,
        node=node,
        forward=forward,
        bad_in=bad_in,
        bad_out=bad_out,
        makers=makers,
        operands=operands,
        results=(tensor("out", nan=1),),
        reference=None,
        settings=settings or {},
    )


def replay(phase, *ops, root="Net#0", externals=()):
    return Replay(
        outcome="origin",
        phase=phase,
        why="",
        reproduced="bit-for-bit",
        micro_step=0,
        origins=() if externals else (ops[-1].index,),
        path=(ops[-1].index,),
        externals=externals,
        ops={o.index: o for o in ops},
        call=None,
        root=root,
    )


def explained(seen, phase=Phase.FORWARD):
    """The culprit of a replay, with its cause."""
    blamed = culprit_op(seen)
    assert blamed is not None
    return Culprit(**vars(blamed), replay=seen, phase=phase, cause=op_cause(seen, blamed, None))


def cause_of(seen):
    return explained(seen).cause


def loss_that_reads(argument):
    """A loss function's two operands: the prediction, and one that holds NaN and was made by nobody we know."""
    reads = op(
        1,
        "aten.smooth_l1_loss.default",
        tensor("self"),
        tensor(argument, nan=1),
        bad_out=NAN,
        makers=((0,), CONSTANT),
    )
    return replay("forward", reads, root="", externals=((*CONSTANT, 1),))


def test_the_derivative_of_a_quotient_that_where_throws_away_is_a_trap():
    """where(x == 0, 1, sin(x) / x): the forward quotient is NaN, too, and the loss never sees it."""
    zeros = tensor("self", zero=1), tensor("other", zero=1)
    forward = op(10, "aten.div.Tensor", *zeros, bad_out=NAN)
    backward = op(75, "aten.div.Tensor", *zeros, phase="backward", node="DivBackward0", forward=10, bad_out=NAN)

    assert cause_of(replay("backward", forward, backward)).name == "where-gradient-trap"


@pytest.mark.parametrize(("value", "name"), [(0.0, "where-gradient-trap"), (-0.02, "domain-edge-gradient")])
def test_elements_that_are_not_gathered_have_a_gradient_of_0(value, name):
    """``log(p).gather(label)``, also in a live trace, which has no facts of the ops around the origin."""
    forward = replace(op(5, "aten.log.default", tensor(zero=2)), results=())
    spread = replace(op(8, "aten.scatter_add.default", phase="backward", node="GatherBackward0"), results=())
    incoming = replace(tensor(zero=15), value=value)
    small = replace(tensor("out", nan=3), pos_inf=2)
    derived = op(9, "aten.div.Tensor", incoming, phase="backward", node="LogBackward0", forward=5, makers=((8,), (1,)))
    derived = replace(derived, bad_out=NAN, results=(small,), reference=tensor("out", nan=3))
    cause = cause_of(replay("backward", forward, spread, derived))

    assert cause.name == name
    assert ("2 more gradients overflow" in cause.why) == (value == 0.0)
    assert "In FP64 3 of these 5 elements" in reference_words(derived, cause)


@pytest.mark.parametrize("bad_out", [0, NEG_INF], ids=["finite", "masked"])
def test_a_forward_value_that_is_finite_or_a_mask_is_no_trap(bad_out):
    forward = op(10, "aten.acos.default", tensor(), bad_out=bad_out)
    backward = op(
        75, "aten.rsqrt.default", tensor(), phase="backward", node="AcosBackward0", forward=10, bad_out=POS_INF
    )

    assert cause_of(replay("backward", forward, backward)).name == "domain-edge-gradient"


@pytest.mark.parametrize(
    ("exponent", "name"), [(-0.5, "sqrt-gradient-at-zero"), (-0.25, "domain-edge-gradient")], ids=["root", "other"]
)
def test_a_power_of_a_half_is_a_square_root_although_only_its_derivative_is_known(exponent, name):
    backward = op(
        75,
        "aten.pow.Tensor_Scalar",
        tensor(zero=4),
        phase="backward",
        node="PowBackward0",
        forward=10,
        bad_out=POS_INF,
        settings={"exponent": exponent},
    )

    assert cause_of(replay("backward", backward)).name == name


def test_the_target_of_a_loss_function_is_data():
    seen = loss_that_reads("target")

    assert cause_of(seen).name == "nonfinite-input-batch"
    assert culprit_phase(SimpleNamespace(module_classes={}), seen, culprit_op(seen)) is Phase.DATA


def test_a_nameless_tensor_in_loss_code_is_no_weight():
    seen = loss_that_reads("other")
    cause = cause_of(seen)

    assert cause.name is None
    assert "made without a gradient" in cause.why
    assert culprit_phase(SimpleNamespace(module_classes={}), seen, culprit_op(seen)) is Phase.LOSS


def reads_named(kind, argument="other"):
    maker = (kind, "" if kind == "constant" else "y")
    reads = op(1, "aten.sub.Tensor", tensor("self"), tensor(argument, nan=1), bad_out=NAN, makers=((0,), maker))
    return replay("forward", reads, root="", externals=((*maker, 1),))


def test_what_a_trace_of_the_run_did_not_see_made_is_from_outside():
    seen = replace(reads_named("constant"), live=True)

    assert "made outside of the trace" in cause_of(seen).why
    words = external_words(explained(seen, Phase.LOSS))
    assert words == "a tensor made outside of the trace"


@pytest.mark.parametrize(
    ("kind", "argument", "words"),
    [
        ("constant", "target", "the target"),
        ("constant", "weight", "the weight of the loss function"),
        ("constant", "other", "a tensor made without a gradient"),
        ("batch", "other", "the batch, argument `y`"),
    ],
)
def test_what_was_read_is_called_by_its_name_or_its_role(kind, argument, words):
    seen = reads_named(kind, argument)

    assert external_words(explained(seen, Phase.LOSS)) == words


def test_a_sum_over_nothing_is_the_end_of_a_mask():
    fill = op(1, "aten.masked_fill.Scalar", tensor(), bad_out=NEG_INF)
    total = op(2, "aten.logsumexp.default", tensor(), bad_out=NEG_INF, makers=((1,),))
    total = replace(total, bad_in=(NEG_INF,))
    square = op(3, "aten.pow.Tensor_Scalar", tensor(), bad_out=POS_INF, makers=((2,),))
    square = replace(square, bad_in=(NEG_INF,))
    seen = replace(replay("forward", fill, total, square), origins=(1,), path=(1, 2, 3))

    assert culprit_op(seen).op is total
    assert cause_of(seen).name == "softmax-fully-masked"
    assert culprit_op(replace(seen, path=(1, 2))) is None


def masked(bad_in):
    """A mask that the model makes first, and a sum of scores and mask."""
    mask = op(1, "aten.full.default", bad_out=NEG_INF)
    total = replace(op(5, "aten.add.Tensor", tensor(), tensor("other"), bad_out=NAN | NEG_INF), bad_in=bad_in)
    return mask, total


def test_a_mask_that_meets_a_nan_of_the_batch_is_not_blamed():
    reads = replace(op(3, "aten.addmm.default", tensor("mat1"), bad_out=NAN), bad_in=(NAN,))
    mask, total = masked((NAN, NEG_INF))
    seen = replay("forward", mask, reads, total, externals=(("batch", "0", 3),))
    seen = replace(seen, origins=(1,), path=(1, 3, 5))

    assert culprit_op(seen).op is reads
    assert cause_of(seen).name == "nonfinite-input-batch"


def test_a_logarithm_of_zeros_is_blamed_only_where_it_is_all_there_is_or_does_harm():
    """``scores + log(allowed)``: the model computes the logarithm first, and its ``-inf`` is what is meant."""
    allowed = replace(op(1, "aten.log.default", number("self", 0.0, 1.0, 0.0), bad_out=NEG_INF), bad_in=(0,))
    product = replace(op(3, "aten.exp.default", number("self", 200.0), bad_out=POS_INF), bad_in=(0,))
    _, total = masked((POS_INF, NEG_INF))
    beside = replace(replay("forward", allowed, product, total), origins=(1, 3), path=(1, 3, 5))
    harmed = replace(op(4, "aten.sub.Tensor", tensor(), tensor("other"), bad_out=NAN), bad_in=(NEG_INF, NEG_INF))

    assert culprit_op(beside).op is product
    assert culprit_op(replace(beside, origins=(1,), path=(1,))).op is allowed
    overflows = replace(allowed, name="aten.sinh.default", reference=tensor("out"))
    assert culprit_op(replace(beside, ops={**beside.ops, 1: overflows})).op is overflows
    both = replay("forward", allowed, product, harmed)
    assert culprit_op(replace(both, origins=(1, 3), path=(1, 3, 4))).op is allowed


@pytest.mark.parametrize("scores", [NAN, NEG_INF | POS_INF], ids=["nan", "infinities"])
def test_a_mask_that_meets_what_another_op_made_is_not_blamed(scores):
    logarithm = replace(op(3, "aten.log.default", number("self", -4.0), bad_out=scores), bad_in=(0,))
    mask, total = masked((scores, NEG_INF))
    seen = replace(replay("forward", mask, logarithm, total), origins=(1, 3), path=(1, 3, 5))

    assert culprit_op(seen).op is logarithm
    assert culprit_op(seen).mask is None


@pytest.mark.parametrize(
    ("bad_out", "name"), [(NAN, "inf-minus-inf"), (POS_INF, "reduction-overflow")], ids=["nan", "inf"]
)
def test_a_difference_whose_operands_are_not_known(bad_out, name):
    assert cause_of(replay("forward", op(1, "aten.sub.default", bad_out=bad_out), root="")).name == name


@pytest.mark.parametrize("scalar", ["Infinity", "NaN"])
def test_a_number_of_the_script_that_is_not_finite_is_named(scalar):
    cause = cause_of(replay("forward", op(1, "aten.mul.Tensor", bad_out=NAN, settings={"other": scalar}), root=""))
    assert cause.name == "other" and f"the scalar `other` passed to mul is {scalar}" in cause.why


def test_a_weight_with_a_name_is_still_told_as_one():
    reads = op(1, "aten.mul.Tensor", tensor("self", nan=1), bad_out=NAN, makers=(("weight", "scale.g"),))
    seen = replay("forward", reads, externals=(("weight", "scale.g", 1),))

    assert culprit_op(seen) == CulpritOp(reads, external=("weight", "scale.g"))
    assert cause_of(seen).name == "nonfinite-weights"


def test_a_rate_that_is_no_number_is_named_with_its_groups():
    step = op(0, "aten.add_.Tensor", tensor(), tensor("other"), bad_out=NAN, settings={"alpha": "NaN"})
    rates = tuple(BadSetting(group, "lr", float("nan")) for group in (1, 2))
    found = cause_of(replace(replay("optimizer", step), bad_settings=rates))

    assert found.name == "other"
    assert found.why.startswith("the learning rate of parameter group 1 (and of group 2) is NaN")


def test_a_scalar_that_an_optimizer_of_ones_own_made_nan():
    step = op(0, "aten.mul.Tensor", tensor(), bad_out=NAN, settings={"other": "NaN"})
    found = cause_of(replay("optimizer", step))

    assert (found.name, found.why) == ("other", "the scalar `other` passed to mul is NaN")


def test_a_bad_gradient_goes_before_a_bad_rate():
    step = op(0, "optim.SGD.step", tensor("grad", nan=1), bad_out=NAN)
    rate = BadSetting(0, "lr", float("nan"))

    assert "gradient" in cause_of(replace(replay("optimizer", step), bad_settings=(rate,))).why


def number(argument, low, high=None, value=None):
    """An operand between two numbers."""
    high = low if high is None else high
    zero, negative = int(low == 0.0 or value == 0.0), int(low < 0)
    return Operand(
        argument, "float32", (16,), 16, 0, 0, 0, zero, negative, low, high, max(abs(low), abs(high)), 0.1, None, value
    )


@pytest.mark.parametrize(
    ("name", "operands", "settings", "bad", "cause"),
    [
        ("Tensor_Tensor", [number("self", 0.0, 9.0, 0.0), number("exponent", -0.5)], {}, POS_INF, "division-by-zero"),
        ("Tensor_Tensor", [number("self", -2.0, 9.0, -2.0), number("exponent", 0.3)], {}, NAN, "domain-error"),
        ("Tensor_Tensor", [number("self", -2.0, 9.0, -2.0), number("exponent", 0.5)], {}, NAN, "sqrt-of-negative"),
        ("Tensor_Tensor", [number("self", 1.0, 3e20, 3e20), number("exponent", 3.0)], {}, POS_INF, "square-overflow"),
        ("Tensor_Tensor", [number("self", 1.0, 3.0, 3.0), number("exponent", 90.0)], {}, POS_INF, "exp-overflow"),
        ("Tensor_Scalar", [number("self", 0.0, 9.0, 0.0)], {"exponent": -1.5}, POS_INF, "division-by-zero"),
        ("Tensor_Scalar", [number("self", -9.0, 9.0, -3.0)], {"exponent": 1.5}, NAN, "domain-error"),
        ("Tensor_Scalar", [number("self", 0.0, 1e20, 1e20)], {"exponent": 2}, POS_INF, "square-overflow"),
        ("Scalar", [number("exponent", 0.0, 300.0, 300.0)], {"self": 2.0}, POS_INF, "exp-overflow"),
        ("Scalar", [number("exponent", -3.0, 1.0, -3.0)], {"self": 0.0}, POS_INF, "division-by-zero"),
        ("Scalar", [number("exponent", 0.3, 1.0, 0.3)], {"self": -2.0}, NAN, "domain-error"),
    ],
)
def test_a_power_is_read_by_its_base_and_its_exponent(name, operands, settings, bad, cause):
    forward = op(3, f"aten.pow.{name}", *operands, bad_out=bad, settings=settings)

    assert cause_of(replay("forward", forward)).name == cause


def derivative(name, *operands, node="PowBackward1", **how):
    made = op(10, "aten.pow.Tensor_Tensor", number("self", 0.0, 9.0), number("exponent", 0.33))
    return replay("backward", made, op(75, name, *operands, phase="backward", node=node, forward=10, **how))


def test_the_derivative_of_a_power_below_one_at_zero():
    """``x ** p`` with a tensor for ``p``, whose derivative takes 0 to the power ``p - 1``."""
    base = number("self", 0.0, 9.0, 0.0)
    third = derivative("aten.pow.Tensor_Tensor", base, number("exponent", -0.67), bad_out=POS_INF)
    half = derivative("aten.pow.Tensor_Tensor", base, number("exponent", -0.5), bad_out=POS_INF)
    half = replace(half, ops={75: half.ops[75]})  # the power itself is not in the log

    assert cause_of(third).name == "domain-edge-gradient"
    assert cause_of(half).name == "sqrt-gradient-at-zero"


def test_a_derivative_of_a_power_that_fp64_keeps_finite_is_no_edge():
    left = derivative("aten.mul.Tensor", number("self", 1e30), number("other", 1e30), bad_out=POS_INF)
    left.ops[75] = replace(left.ops[75], reference=number("out", 1e60))

    assert cause_of(left).name == "square-overflow"


def test_hypot_has_no_derivative_at_zero():
    zeros = number("self", 0.0, 0.0, 0.0), number("other", 0.0, 9.0, 0.0)
    backward = op(75, "aten.div.Tensor", *zeros, phase="backward", node="HypotBackward0", bad_out=NAN)

    assert cause_of(replay("backward", backward)).name == "norm-gradient-at-zero"


def test_a_function_of_the_script_that_is_called_like_one_of_torch_is_not_it():
    """``class Norm(torch.autograd.Function)``: its node is ``NormBackward``; torch's own have a number behind it."""
    zeros = number("self", 0.5, 9.0), number("other", 0.0, 0.0, 0.0)
    by_hand, of_torch = (
        op(75, "aten.div.Tensor", *zeros, phase="backward", node=node, bad_out=POS_INF)
        for node in ("NormBackward", "NormBackward1")
    )

    assert cause_of(replay("backward", of_torch)).name == "norm-gradient-at-zero"
    assert cause_of(replay("backward", by_hand)).name == "division-by-zero"


def test_ops_of_hooks_are_told_by_nodes_that_compute_nothing():
    nodes = ("torch::autograd::AccumulateGrad", "BackwardHookFunctionBackward", "AddmmBackward0", "NormBackward", None)
    ops = [op(3, "aten.div.Tensor", phase="backward", node=node) for node in nodes]

    assert [o.runs_in_hook for o in ops] == [True, True, False, False, False]
    assert [o.function_name for o in ops[3:]] == ["Norm", "div"]


@pytest.mark.parametrize("name", ["masked_fill.Scalar", "scalar_tensor.default", "fill_.Scalar"])
def test_a_nan_that_the_code_fills_in_is_a_constant(name):
    cause = cause_of(replay("forward", op(3, f"aten.{name}", bad_out=NAN)))

    assert (cause.name, cause.confidence) == ("other", 0.8)
    assert "the constant NaN" in cause.why


LITERAL = ("literal", "far")


def infinite(argument):
    return replace(tensor(argument), pos_inf=3)


def test_infinities_of_the_code_are_blamed_on_what_makes_nan_of_them():
    """A table of distances that begins with infinities; two of them are subtracted."""
    reads = op(4, "aten.minimum.default", infinite("self"), bad_out=POS_INF, makers=(LITERAL,))
    reads = replace(reads, bad_in=(POS_INF,))
    spoils = op(6, "aten.sub.Tensor", infinite("self"), infinite("other"), bad_out=NAN, makers=((4,), (4,)))
    spoils = replace(spoils, bad_in=(POS_INF, POS_INF))
    seen = replace(replay("forward", reads, spoils, root="", externals=((*LITERAL, 4),)), path=(4, 6))

    assert culprit_op(seen).op.index == 6
    assert cause_of(seen).name == "inf-minus-inf"


@pytest.mark.parametrize(("bad_out", "blamed"), [(NAN, 6), (POS_INF, 3)], ids=["nan", "still-infinite"])
def test_a_fill_of_infinity_is_blamed_only_where_nothing_makes_nan_of_it(bad_out, blamed):
    fills = op(3, "aten.masked_fill.Scalar", tensor(), bad_out=POS_INF)
    spoils = op(6, "aten.sub.Tensor", infinite("self"), infinite("other"), bad_out=bad_out, makers=((3,), (3,)))
    spoils = replace(spoils, bad_in=(POS_INF, POS_INF))
    seen = replace(replay("forward", fills, spoils, root=""), origins=(3,), path=(3, 6))

    assert culprit_op(seen).op.index == blamed


@pytest.mark.parametrize(("amax", "cause"), [((3e20, 500.0), "square-overflow"), ((1e19, 500.0), "reduction-overflow")])
def test_a_squared_error_overflows_in_a_square_or_in_their_sum(amax, cause):
    prediction, target = (
        replace(tensor(n), min=-a, max=a, amax=a) for n, a in zip(("self", "target"), amax, strict=True)
    )
    made = replace(op(1, "aten.mse_loss.default", prediction, target, bad_out=POS_INF), reference=tensor("out"))
    assert cause_of(replay("forward", made)).name == cause


@pytest.mark.parametrize(
    ("shape", "cause"), [((), "reduction-overflow"), ((16,), "other")], ids=["summed", "element by element"]
)
def test_a_loss_whose_sum_leaves_the_format_is_an_overflow_whatever_its_name(shape, cause):
    half = replace(tensor("out", nan=0, dtype="float16"), shape=shape, numel=16 if shape else 1)
    exact = replace(half, dtype="float64", max=70330.0, amax=70330.0)
    made = op(1, "aten.binary_cross_entropy.default", tensor(dtype="float16"), tensor("target"), bad_out=POS_INF)
    made = replace(made, results=(half,), reference=exact)
    found = cause_of(replay("forward", made))
    assert found.name == cause
    assert ("reaches 7.033e+04" in found.why) == (reference_words(made, found) == "") == (not shape)


@pytest.mark.parametrize(
    ("steps", "scale"),
    [
        ({3: (65536.0, 1), 4: (None, 0), 5: (None, 0)}, 65536.0),  # the gradients of step 3, used twice more
        ({3: (65536.0, 1), 4: (None, 1), 5: (None, 0)}, None),
        ({5: (None, 0)}, None),
        ({4: (512.0, 1), 5: (256.0, 0)}, 256.0),
    ],
)
def test_gradients_used_again_bear_the_scale_they_were_made_with(steps, scale):
    facts = {s: SimpleNamespace(step=s, loss_scale=x, micro_steps=m) for s, (x, m) in steps.items()}
    view = SimpleNamespace(step_facts=lambda _process, step: facts.get(step))
    assert gradient_scale(view, None, 5) == scale


def test_a_cause_without_a_name_of_its_own_is_told_by_its_words():
    told = Cause("exp-overflow", 0.9, "its operand reaches 89")
    assert (told.in_brackets, told.sentence) == (" (exp-overflow)", " Cause: exp-overflow: its operand reaches 89.")
    other = Cause("other", 0.9, "the scalar `other` passed to mul is NaN")
    assert (other.in_brackets, other.sentence) == ("", " Cause: the scalar `other` passed to mul is NaN.")
    assert (Cause(None, 0.0, "").in_brackets, Cause(None, 0.0, "").sentence) == ("", "")


def test_a_power_that_only_fp64_holds_is_no_trap_although_the_loss_stayed_finite():
    """GELU in FP16: the tanh of an overflown cube is 1, and the cube's derivative is too large as well."""
    x = replace(tensor("self"), min=-386.0, max=392.0, amax=392.0)
    cube = op(1, "aten.pow.Tensor_Scalar", x, bad_out=POS_INF, settings={"exponent": 3.0})
    settings = {"exponent": 2.0}
    slope = op(2, "aten.pow.Tensor_Scalar", x, phase="backward", forward=1, bad_out=POS_INF, settings=settings)
    trap = cause_of(replay("backward", cube, replace(slope, reference=tensor("out", nan=1))))
    assert trap.name == "where-gradient-trap"
    ended = cause_of(replay("backward", cube, replace(slope, reference=tensor("out"))))
    assert ended.name == "square-overflow" and "the forward pass still ends finite" in ended.why


def test_a_mean_over_targets_of_which_none_counts():
    none = replace(tensor("out"), zero=1, numel=1, amax=0.0)
    ignored = replace(
        op(0, "aten.nll_loss_forward.default", tensor(), bad_out=NAN, settings={"ignore_index": -100}),
        results=(tensor("out", nan=1), none),
    )
    some = replace(ignored, results=(tensor("out", nan=1), replace(none, amax=3.0)))

    assert cause_of(replay("forward", ignored)).name == "division-by-zero"
    assert "-100" in cause_of(replay("forward", ignored)).why
    assert cause_of(replay("forward", some)).name != "division-by-zero"


@pytest.mark.parametrize(("number", "name"), [(-1e9, "cast-overflow"), (-1e4, "other")])
def test_a_constant_that_does_not_fit_into_half_precision(number, name):
    mask = replace(
        op(0, "aten.mul.Tensor", tensor(dtype="float16"), bad_out=NEG_INF, settings={"other": number}),
        results=(tensor("out", dtype="float16"),),
    )

    assert cause_of(replay("forward", mask)).name == name


def test_a_value_just_past_the_end_of_a_domain_is_not_rounded_to_the_end():
    """``acos((u * v).sum(-1))`` of normalised vectors."""
    arc = op(1, "aten.acos.default", replace(tensor(), min=1.0, max=1.0000001192, value=1.0000001192), bad_out=NAN)

    assert "from 1 to 1.0000001, past" in cause_of(replay("forward", arc)).why
    assert "from 1 to 1.0000001 and is 1.0000001 there" in operand_words(arc)


def test_nothing_is_said_of_operands_that_are_not_known():
    seen = cause_of(replay("forward", op(1, "aten.grid_sampler_2d.default", bad_out=NAN)))
    assert seen.name == "other" and "finite operands" not in seen.why
    known = cause_of(replay("forward", op(1, "aten.grid_sampler_2d.default", tensor(), bad_out=NAN)))
    assert "finite operands" in known.why
    solve = replace(op(1, "aten.linalg_solve_triangular.default", tensor(), bad_out=NAN), unknown=("B",))
    partly = cause_of(replay("forward", solve))
    assert "lacks operand `B`" in partly.why and partly.may_pass_on and not known.may_pass_on


@pytest.mark.parametrize(("first_bad", "count", "named"), [((5,), 1, True), ((5,), 3, True), ((2,), 3, False)])
def test_a_constant_is_the_tensor_of_the_batch_that_is_bad_in_the_same_sample(first_bad, count, named):
    labels = BadTensor("`labels`", (1, 0, 0), 16, (5,), 1, (21,), in_order=True, delivered=True)
    constant = replace(tensor("other", nan=count), first_bad=first_bad)
    sub = op(1, "aten.sub.Tensor", tensor(), constant, bad_out=NAN, makers=((0,), CONSTANT))
    seen = replace(replay("forward", sub, root="", externals=((*CONSTANT, 1),)), bad_data=(labels,))
    at = culprit_op(seen)

    assert (op_cause(seen, at, None).name == "nonfinite-input-batch") == named
    assert at.delivered(seen.bad_data) == (labels if named else None)
    assert culprit_op(replace(seen, bad_data=())).delivered(()) is None


@pytest.mark.parametrize(
    ("name", "title", "line"),
    [
        ("aten.rsqrt.default", "add eps 1e-06 to the operand of rsqrt", "torch.rsqrt(x + 1e-06)"),
        ("aten.reciprocal.default", "add eps 1e-06 to the divisor", "x / (divisor + 1e-06)"),
    ],
)
def test_an_eps_goes_where_the_code_can_take_it(name, title, line):
    zeros = replace(tensor(zero=16), min=-0.0, max=0.0, amax=0.0, value=-0.0)
    seen = replay("forward", op(1, name, zeros, bad_out=POS_INF))
    culprit = explained(seen)
    assert culprit.cause.name == "division-by-zero"
    prescription = prescribe(None, None, culprit)
    assert title in prescription.title and line in prescription.snippet
    assert operand_words(culprit.op) == "Operand `self` (float32, 16) is 0 throughout."


@pytest.mark.parametrize(("name", "bad", "blamed"), [("exp", NAN, False), ("exp", POS_INF, True), ("log", NAN, True)])
def test_what_cannot_have_made_a_value_is_not_blamed(name, bad, blamed):
    seen = replay("forward", op(3, f"aten.{name}.default", bad_out=bad))

    assert (culprit_op(seen) is not None) is blamed


def test_nothing_is_blamed_behind_a_value_that_nobody_knows():
    first = op(3, "aten.exp.default", tensor(), bad_out=NAN, makers=(("unknown", ""),))
    later = op(5, "aten.log.default", tensor(), bad_out=NAN)
    seen = replace(replay("forward", first, later), externals=(("unknown", "", 3),))

    assert culprit_op(seen) is None
    assert culprit_op(replace(seen, externals=(("unknown", "", 7),))).op is later


def gradient(value, shape=(16,)):
    return replace(tensor("self", zero=4), value=value, shape=shape)


@pytest.mark.parametrize(
    ("settings", "value", "cause"),
    [
        ({"condition": False}, 0.0, "where-gradient-trap"),  # the loss did not depend on it at all
        ({"condition": True}, 0.0, "sqrt-gradient-at-zero"),  # a mask had been multiplied in
        ({}, 0.25, "where-gradient-trap"),
        ({}, 0.0, "sqrt-gradient-at-zero"),
    ],
)
def test_a_zero_that_was_there_before_where_is_no_trap(settings, value, cause):
    chosen = op(4, "aten.where.self", gradient(value), gradient(0.0, ()), phase="backward", node="WhereBackward0")
    chosen = replace(chosen, results=(gradient(0.0),), settings=settings)
    root = op(3, "aten.sqrt.default", tensor(zero=4))
    divided = op(
        5,
        "aten.div.Tensor",
        *(gradient(0.0), tensor("other", zero=4)),
        phase="backward",
        node="SqrtBackward0",
        forward=3,
        bad_out=NAN,
        makers=((4,), (3,)),
    )

    assert cause_of(replay("backward", root, chosen, divided)).name == cause


def test_an_overflow_that_where_throws_away_is_its_trap():
    """``where(x > 0, x + 1, exp(x))`` in FP16: the loss never sees the infinity, its gradient is 0 times that."""
    large = op(3, "aten.exp.default", tensor(dtype="float16"), bad_out=POS_INF)
    large = replace(large, reference=tensor("out"))
    chosen = op(4, "aten.where.self", gradient(0.0, ()), gradient(0.25), phase="backward", node="WhereBackward0")
    chosen = replace(chosen, results=(gradient(0.0),), settings={"condition": True})
    times = op(5, "aten.mul.Tensor", phase="backward", node="ExpBackward0", bad_out=NAN, makers=((4,), (3,)))
    seen = replace(replay("backward", large, chosen, times), origins=(3,), path=(3, 5))

    assert cause_of(seen).name == "where-gradient-trap"
    assert cause_of(replace(seen, ops={3: large, 5: times})).name == "exp-overflow"


@pytest.mark.parametrize(
    ("filling", "title"),
    [
        (-3.4028234663852886e38, "use -10000 in place of the constant"),  # finfo(float32).min, infinite in BF16, too
        (-1e9, "use -10000 in place of the constant"),
        (-123456.0, "use BF16 in place of FP16"),
    ],
)
def test_what_a_mask_is_filled_with_is_no_matter_of_range(filling, title):
    scores = replace(tensor(), min=filling, max=-0.0, amax=-filling, value=filling)
    cast = replace(
        op(0, "aten._to_copy.default", scores, bad_out=NEG_INF),
        results=(tensor("out", dtype="float16"),),
        reference=replace(tensor("out"), amax=-filling),
    )
    seen = replay("forward", cast)
    culprit = explained(seen)
    assert culprit.cause.name == "cast-overflow"
    assert prescribe(SimpleNamespace(device="cpu"), None, culprit).title.startswith(title)


def test_bf16_is_not_proposed_for_what_it_would_round_to_infinity():
    """3.397e38 lies past the middle between its largest number and 2^128."""
    products = op(0, "aten.mm.default", tensor(dtype="float16"), tensor("mat2", dtype="float16"), bad_out=POS_INF)
    product = replace(products, results=(tensor("out", dtype="float16"),), reference=tensor("out"))
    incident, view = SimpleNamespace(process=0, step=3, last_finite=None), SimpleNamespace(device="cpu", timeline={})

    def title(reach):
        seen = replay("forward", replace(product, reference=replace(tensor("out"), amax=reach)))
        culprit = explained(seen)
        return prescribe(view, incident, culprit).title

    assert "BF16" in title(3.39e38)
    assert "BF16" not in title(3.397e38)


@pytest.mark.parametrize(
    ("lowest", "squared", "advice"),
    [(-0.5, True, "mean of squared differences, in FP32"), (-0.5, False, "clamp"), (-40.0, True, "clamp")],
)
def test_a_variance_that_rounding_makes_negative_is_computed_wide(lowest, squared, advice):
    """E[x^2] - E[x]^2 in FP16, of numbers near 30: a clamp would leave a variance that is noise."""
    means = [replace(tensor(name, dtype="float16"), min=887.0, max=910.0, amax=910.0) for name in ("self", "other")]
    left = replace(tensor(dtype="float16"), min=lowest)
    square = op(8, "aten.mul.Tensor", means[0], means[0], makers=((5,), (5,) if squared else (4,)))
    difference = replace(op(9, "aten.sub.Tensor", *means, makers=((7,), (8,))), results=(left,))
    with_eps = op(10, "aten.add.Tensor", left, makers=((9,),), settings={"other": 1e-8})
    root = op(11, "aten.rsqrt.default", left, makers=((10,),), bad_out=NAN)
    root = replace(root, reference=tensor("out", nan=1))
    seen = replay("forward", square, difference, with_eps, root)
    culprit = explained(seen)
    rounded = lowest == -0.5
    assert culprit.cause.name == "sqrt-of-negative"
    assert ("up to 910, which are 0.5 apart in float16" in culprit.cause.why) is rounded
    assert ("no wider format would help" in reference_words(root, culprit.cause)) is not rounded
    assert advice in prescribe(None, None, culprit).title


def quotient(numerator, divisor, *, made="aten.sum.dim_IntList", low=None, high=None, **more):
    """A quotient of FP32 tensors that hold these values where it is not finite; ``made``: what made the divisor."""
    first = replace(tensor("self", zero=int(numerator == 0)), value=numerator, amax=3.0, min=0.0, max=3.0)
    other = replace(tensor("other", zero=1), value=divisor, amin_nonzero=low, max=high, amax=high, min=0.0, negative=0)
    maker = op(4, made, tensor())
    divided = replace(op(5, "aten.div.Tensor", first, other, makers=((3,), (4,)), bad_out=NAN), **more)
    seen = replay("forward", maker, divided)
    return explained(seen, Phase.LOSS)


@pytest.mark.parametrize(
    ("numerator", "low", "high", "nothing", "title"),
    [
        (0.0, 1.0, 10.0, True, "divide by max(count, 1)"),
        (0.0, None, 0.0, True, "divide by max(count, 1)"),
        (0.0, 1.37, 6.4, True, "add eps 1e-06 to the divisor"),
        (0.5, 1.0, 10.0, False, "add eps 1e-06 to the divisor"),
    ],
)
def test_zero_by_zero_is_a_count_of_nothing(numerator, low, high, nothing, title):
    culprit = quotient(numerator, 0.0, low=low, high=high)
    assert culprit.cause.name == "division-by-zero"
    assert ("0 / 0, a count of nothing or an empty selection" in culprit.cause.why) is nothing
    assert prescribe(None, None, culprit).title.startswith(title)


@pytest.mark.parametrize("made", ["aten.std.correction", "aten.linalg_vector_norm.default"])
def test_numbers_that_are_all_alike_are_no_count_of_nothing(made):
    culprit = quotient(0.0, 0.0, made=made, high=0.0)
    assert culprit.cause.name == "division-by-zero"
    assert "count of nothing" not in culprit.cause.why


@pytest.mark.parametrize(
    ("made", "name"), [("aten.linalg_vector_norm.default", "norm"), ("aten.sum.dim_IntList", "divisor")]
)
def test_a_divisor_is_called_a_norm_only_if_it_is_one(made, name):
    culprit = quotient(0.5, 0.0, made=made, low=0.1, high=2.0)
    assert f"y = x / ({name} + 1e-06)" in prescribe(None, None, culprit).snippet


@pytest.mark.parametrize("numerator", [0.0, 0.5])
def test_nobody_is_told_to_edit_a_library(numerator):
    """What can be changed is the call, or what is passed to it."""
    lines = {"source": Source("lib/losses.py", 47), "in_library": True, "caller": Source("train.py", 12)}
    culprit = quotient(numerator, 0.0, low=1.0, high=2.0, **lines)
    incident = SimpleNamespace(poison=None)
    prescription = prescribe(None, incident, culprit)
    assert "losses.py" not in f"{prescription}" and "train.py:12" in prescription.title
    assert ("nothing is counted" in prescription.title) is (numerator == 0.0)
    words = library_words(None, incident, culprit)
    assert words == " lib/losses.py is part of a library; the last line of yours that led there is train.py:12."
    assert library_words(None, incident, quotient(0.5, 0.0, low=1.0, high=2.0)) == ""


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("cause", ["optimizer-division-by-zero", "cast-overflow"])
def test_no_constant_of_a_library_is_to_be_changed(cause, library):
    culprit = quotient(0.5, 0.0, low=0.1, high=2.0, source=Source("lib/ops.py", 47), in_library=library)
    overflown = replace(tensor("out", dtype="float16"), pos_inf=1)
    exact = replace(tensor("out", dtype="float64"), amax=1e5)
    made = replace(culprit.op, settings={"value": -1e9}, results=(overflown,), reference=exact)
    operands = made.operands if cause != "cast-overflow" else (tensor(dtype="float16"),)
    made = replace(made, operands=operands)
    culprit = replace(culprit, op=made, external=None, mask=None, cause=Cause(cause, 0.9, "why"))
    incident = SimpleNamespace(poison=None, last_finite=3, step=4)
    assert ("lib/ops.py" in prescribe(None, incident, culprit).title) is not library


@pytest.mark.parametrize(("dtype", "lowest"), [("float16", -0.5), ("float32", -6e-5)])
def test_a_variance_is_sent_out_of_autocast_only_from_half_precision(dtype, lowest):
    means = [replace(tensor(name, dtype=dtype), min=887.0, max=910.0, amax=910.0) for name in ("self", "other")]
    left = replace(tensor(dtype=dtype), min=lowest)
    square = op(8, "aten.square.default", means[0], makers=((5,),))
    difference = replace(op(9, "aten.sub.Tensor", *means, makers=((7,), (8,))), results=(left,))
    root = op(11, "aten.sqrt.default", left, makers=((9,),), bad_out=NAN)
    seen = replay("forward", square, difference, root)
    culprit = explained(seen)
    prescription = prescribe(None, None, culprit)
    assert "mean of squared differences" in prescription.title
    narrow = dtype == "float16"
    assert ("FP32" in prescription.title, "autocast" in prescription.snippet) == (narrow, narrow)


@pytest.mark.parametrize(
    ("counts", "why", "title"),
    [
        ((tensor("other", zero=1, dtype="int64"),), "the divisor holds 1 exact zero", "max(count, 1)"),
        ((), "the divisor is not in the log", "to the divisor"),
    ],
)
def test_a_count_that_is_zero_is_a_divisor_and_what_it_divides_is_none(counts, why, title):
    """A sum over a mask, divided by how many elements the mask keeps: integers, of which one is 0."""
    divided = replace(op(0, "aten.div.Tensor", tensor(zero=1), bad_out=NAN), integers=counts)
    seen = replay("forward", divided)
    culprit = explained(seen)
    assert culprit.cause.name == "division-by-zero" and culprit.cause.why.startswith(why)
    assert title in prescribe(None, None, culprit).title
    assert ("`other` (int64, 16)" in operand_words(divided)) is bool(counts)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "aten.smooth_l1_loss.default",
            "torch.nn.functional.smooth_l1_loss(x, y, reduction='sum') / max(x.numel(), 1)",
        ),
        ("aten.mean.default", "x.sum() / max(x.numel(), 1)"),
    ],
)
def test_no_eps_is_added_to_a_mean_over_an_empty_selection(name, line):
    nothing = replace(tensor(), shape=(0,), numel=0, negative=0, min=None, max=None, amax=None, amin_nonzero=None)
    operands = (nothing, replace(nothing, argument="target"))[: 1 + name.endswith("loss.default")]
    made = replace(op(0, name, *operands, bad_out=NAN), reference=replace(tensor("out", nan=1), amax=None))
    seen = replay("forward", made)
    culprit = explained(seen)
    assert culprit.cause.name == "division-by-zero"
    prescription = prescribe(None, None, culprit)
    assert line in prescription.snippet and "eps" not in prescription.title


def test_the_spread_of_one_sample_is_that_of_one_element():
    """Eight features of a last batch that holds one sample: eight spreads, each of one element."""
    features = replace(tensor(), shape=(1, 8), numel=8)
    made = replace(tensor("out", nan=8), shape=(8,), numel=8)
    std = replace(op(0, "aten.std.correction", features, bad_out=NAN), results=(made,), reference=made)
    seen = replay("forward", std)
    culprit = explained(seen)
    assert culprit.cause.why == "std of 1 element divides by zero"
    assert prescribe(None, None, culprit).title.startswith("drop a last batch of one sample")


def test_what_the_loss_leaves_out_is_told_by_its_operation():
    """Padding: eps is 0 in FP16, the norm of an empty row is infinite, NaN goes to the end of the forward pass."""
    zero = replace(tensor(zero=16, dtype="float16"), min=0.0, max=0.0, amax=0.0, value=0.0)
    add = replace(op(0, "aten.add.Tensor", zero), results=(zero,), reference=replace(tensor("out"), amin_nonzero=1e-8))
    rsqrt = replace(op(1, "aten.rsqrt.default", zero, bad_out=POS_INF, makers=((0,),)), reference=tensor("out", nan=1))
    seen = replay("backward", add, rsqrt)
    cause = cause_of(seen)
    assert cause.name == "division-by-zero" and "the loss leaves that out" in cause.why
    assert "wider format keeps them from 0" in reference_words(rsqrt, cause)
    masked = op(2, "aten.mul.Tensor", tensor(nan=1), phase="backward", bad_out=NAN, makers=((1,),))
    inside = replace(seen, path=(1, 2), ops={**seen.ops, 2: masked})
    assert cause_of(inside).name == "where-gradient-trap"


@pytest.mark.parametrize(
    ("numel", "dtype", "kind", "made"),
    [
        (16, "float32", "input", True),
        (64, "float32", "input", False),
        (64, "float32", "output", True),  # of four calls
        (16, "float16", "output", False),
    ],
)
def test_the_first_bad_tensor_that_is_recorded_may_come_after_the_result_of_the_op(numel, dtype, kind, made):
    """Its range is then none of the op's: a softmax follows scores that overflow."""
    row = SimpleNamespace(numel=numel, dtype=dtype, kind=kind, module="front")
    incident = SimpleNamespace(origin=SimpleNamespace(row=row))
    assert made_origin(incident, op(0, "aten.bmm.default", tensor())) == made


def test_an_exp_of_which_only_the_result_is_known_is_cured_before_it():
    """``exp(scores.masked_fill(mask, -1e4))``: autograd saves what ``exp`` returns, and nothing of what it reads."""
    large = replace(op(3, "aten.exp.default", bad_out=POS_INF), results=(tensor("out"),))

    seen = replay("forward", large)
    culprit = explained(seen)
    assert culprit.cause.name == "exp-overflow" and "88.72" in culprit.cause.why
    assert prescribe(None, None, culprit).title.startswith("clamp the operand of exp at 88")
