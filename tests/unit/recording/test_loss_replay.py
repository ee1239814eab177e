"""Loss code run again from the graph it left, where the graph does not hold everything."""

import itertools
import types

import pytest
import torch

from precdoctor.recording.microscope.examination import _loss_code
from precdoctor.recording.microscope.loss_replay import replay_loss
from precdoctor.recording.microscope.tracer import External
from precdoctor.recording.ops.tensor_facts import NAN, NEG_INF, POS_INF
from precdoctor.recording.scene.loss_graph import Leaf, LossGraph, LossNode

NUMBERS = itertools.count()
#: A note of line 7 of train.py.
NOTE = f"precdoctor\0\0{7}\0train.py"


def node(name, shape, *behind, **saved):
    edges = [(each, 0) for each in behind]
    metadata = [torch.empty(shape, device="meta")]
    return LossNode(f"{name}Backward0", NOTE, metadata, next(NUMBERS), saved, edges)


def run(top, value, **options):
    return replay_loss(LossGraph(0, top, torch.tensor(value), None), backward=False, **options)


def test_a_strided_view_is_what_it_was():
    leaf = Leaf("Net#0 output", torch.arange(6.0))
    windows = node("AsStrided", (3, 4), leaf, size=(3, 4), stride=(1, 1), storage_offset=0)
    done = run(node("Sum", (), windows), 30.0)

    assert (done.compared, done.equal) == (1, 1)


def test_an_unknown_operand_of_what_is_minus_infinity_was_a_mask():
    """masked_fill saves neither its value nor its result; log_softmax saves its result only."""
    leaf = Leaf("Net#0 output", torch.zeros(2, 2))
    masked = node("MaskedFill", (2, 2), leaf, mask=torch.tensor([[True, False], [True, False]]))
    logs = node("LogSoftmax", (2, 2), masked, dim=1, result=torch.tensor([[-torch.inf, 0.0], [-torch.inf, 0.0]]))
    product = node("Mul", (2, 2), logs, None, other=torch.tensor([0.0, 1.0]))
    done = run(node("Sum", (), product), torch.nan)
    softmax, times = (next(r for r in done.tracer.records if op in r.op) for op in ("log_softmax", "mul"))

    assert softmax.bad_in == (0, NEG_INF)
    assert (times.bad_in[0], times.bad_out) == (NEG_INF, NAN)
    assert done.slice().origins == ()


def test_a_mask_that_is_empty_fills_nothing_in():
    """``cross_entropy`` with label smoothing fills in 0 where a label is ignored, and saves the mask only."""
    leaf = Leaf("Net#0 output", torch.tensor([1.0, 2.0]))
    kept = node("MaskedFill", (2,), leaf, mask=torch.tensor([False, False]))
    done = run(node("Sum", (), kept), 3.0)

    assert (done.compared, done.equal) == (1, 1)


@pytest.mark.parametrize("ends", [True, False], ids=["to its end", "not to its end"])
def test_a_mask_that_reaches_the_loss_is_shown_where_it_does_harm(ends):
    leaf = Leaf("Net#0 output", torch.zeros(2, 2))
    masked = node("MaskedFill", (2, 2), leaf, mask=torch.tensor([[True, False], [True, False]]))
    logs = node("LogSoftmax", (2, 2), masked, dim=1, result=torch.tensor([[-torch.inf, 0.0], [-torch.inf, 0.0]]))
    smooth = node("Neg", (2,), node("Sum", (2,), logs, dim=(1,), keepdim=False))
    ignored = node("MaskedFill", (2,), smooth, mask=torch.tensor([not ends, False]))
    done = run(node("Sum", (), ignored), torch.inf)
    path = [done.tracer.records[i].op for i in done.slice().path]

    assert [bad for _, bad, _ in done.bad_outputs] == [POS_INF]
    assert path[:3] == ["aten.log_softmax.default", "aten.sum.dim_IntList", "aten.neg.default"]
    assert done.slice().made_worse(done.tracer.records)


def test_an_op_that_is_called_like_a_function_of_torch_with_other_arguments():
    """``ctc_loss`` takes a mean; autograd knows the ``_ctc_loss`` in it."""
    leaf = Leaf("Net#0 output", torch.zeros(2, 1, 3).log_softmax(-1))
    settings = {"input_lengths": (2,), "target_lengths": (3,), "blank": 0, "zero_infinity": False}
    each = node("CtcLoss", (1,), leaf, targets=torch.ones(1, 3, dtype=torch.int64), **settings)
    done = run(node("Sum", (), each), torch.inf)

    assert [done.tracer.records[i].op for i in done.slice().origins] == ["aten._ctc_loss.default"]


def test_what_is_minus_infinity_stays_so_when_a_constant_is_taken_from_it():
    leaf = Leaf("Net#0 output", torch.tensor([-torch.inf, 0.0]))
    less = node("Sub", (2,), leaf)
    squares = node("Pow", (2,), less, self=torch.tensor([-torch.inf, -1.0]), exponent=2.0)
    done = run(node("Sum", (), squares), torch.inf)

    assert not any(r.bad_out & NAN for r in done.tracer.records)


def test_what_is_bad_before_a_constant_is_added_is_followed_through_it():
    """``x + eps`` saves neither eps nor its result; sqrt saves its result only."""
    leaf = Leaf("Net#0 output", torch.tensor([1.0, 0.0]))
    spread = node("Div", (2,), leaf, leaf, self=leaf.value, other=leaf.value)
    more = node("Add", (2,), spread)
    root = node("Sqrt", (2,), more, result=torch.tensor([1.0, torch.nan]))
    done = run(node("Sum", (), root), torch.nan)

    assert [done.tracer.records[i].op for i in done.slice().origins] == ["aten.div.Tensor"]


def test_the_tensor_no_graph_knows_is_a_constant():
    leaf = Leaf("Net#0 output", torch.ones(2))
    off = node("Sub", (2,), leaf)
    top = node("Sum", (), node("Pow", (2,), off, self=torch.tensor([torch.nan, 0.0]), exponent=2.0))

    done = run(top, torch.nan)
    assert {e for e, _ in done.slice().externals} == {External("constant")}


def solved(*, of_constant: bool, diagonal: float = 2.0):
    """A triangular solve of ``target - mean``, which saves the matrix and the result; the target has a NaN."""
    matrix = Leaf("weight", torch.tensor([[diagonal, 0.0], [1.0, 1.0]]))
    mean = Leaf("Net#0 output", torch.zeros(2, 1))
    off = node("Sub", (2, 1), *((None, mean) if of_constant else (mean, Leaf("hidden", None))))
    result = torch.tensor([[0.5], [torch.nan]])
    solve = node("LinalgSolveTriangular", (2, 1), matrix, off, self=matrix.value, result=result)
    return run(node("Sum", (), solve), torch.nan)


def test_a_solve_of_an_unseen_target_did_not_make_its_nan():
    done = solved(of_constant=True)
    (index,) = (i for _, i in done.slice().externals)

    assert done.slice().origins == ()
    assert {e for e, _ in done.slice().externals} == {External("constant")}
    assert done.tracer.records[index].op.startswith("aten.sub")
    assert {e for e, _ in solved(of_constant=False).slice().externals} == {External("unknown")}


def test_an_op_that_may_have_made_a_nan_has_the_names_of_its_unknown_operands():
    done = solved(of_constant=True, diagonal=0.0)
    (origin,) = done.slice().origins

    assert [o["argument"] for o in done.tracer.records[origin].facts["operands"]] == ["self"]
    assert done.tracer.records[origin].facts["unknown"] == ["B"]


def test_a_sum_with_a_bad_constant_shows_where_it_is_bad():
    leaf = Leaf("Net#0 output", torch.ones(2))
    off = node("Sub", (2,), leaf, None)
    done = run(node("Sum", (), node("Log", (2,), off, self=torch.tensor([1.0, torch.nan]))), torch.nan)
    ((external, index),) = done.slice().externals
    (_, constant) = done.tracer.records[index].facts["operands"]

    assert external == External("constant")
    assert (constant["argument"], constant["nan"], constant["first_bad"], constant["amax"]) == ("other", 1, [1], None)


def test_a_sum_is_infinite_because_a_constant_is():
    off = node("Sub", (2,), Leaf("Net#0 output", torch.ones(2)), None)
    squares = node("Pow", (2,), off, self=torch.tensor([1.0, torch.inf]), exponent=2.0)
    done = run(node("Sum", (), squares), torch.inf)
    ((external, index),) = done.slice().externals
    (_, constant) = done.tracer.records[index].facts["operands"]

    assert external == External("constant") and not done.slice().origins
    assert (constant["neg_inf"], constant["pos_inf"]) == (1, 0)


def test_gradients_pass_a_constant_that_was_not_saved_and_a_relu_that_saved_its_result_only():
    """``relu(1 - sqrt(x))``: rsub saves nothing, and relu's result is all that tells of it."""
    leaf = Leaf("Net#0 output", torch.tensor([0.0, 0.25, 4.0]))
    root = node("Sqrt", (3,), leaf, result=torch.tensor([0.0, 0.5, 2.0]))
    less = node("Rsub", (3,), root, alpha=1)
    top = node("Sum", (), node("Relu", (3,), less, result=torch.tensor([1.0, 0.5, 0.0])))
    done = replay_loss(LossGraph(0, top, torch.tensor(1.5), None), backward=True)

    assert (done.compared, done.equal) == (1, 1)
    assert [name for name, *_ in done.bad_gradients] == ["Net#0 output"]


def gradients(top, value):
    return replay_loss(LossGraph(0, top, torch.tensor(value), None), backward=True)


def test_gradients_go_through_where_and_through_constants_that_nobody_saved():
    """``where(x <= t, 12.92 * x, 1.055 * x ** p - 0.055)``: the power is NaN where it is not taken."""
    x = torch.tensor([-1.0, 1.0])
    leaf = Leaf("Net#0 output", x)
    line = node("Mul", (2,), leaf, None, self=x, other=torch.tensor(12.92))
    power = node("Pow", (2,), leaf, self=x, exponent=0.4)
    curve = node("Sub", (2,), node("Mul", (2,), power, None, other=torch.tensor(1.055)), None, alpha=1)
    done = gradients(node("Sum", (), node("Where", (2,), line, curve, condition=x <= 0.003)), -11.0)
    origin = done.tracer.records[done.slice().origins[0]]

    assert [bad for _, bad, _ in done.bad_gradients] == [NAN]
    assert "pow" in origin.op


@pytest.mark.parametrize("name", ["where", "filled"])
def test_gradients_go_through_what_a_constant_was_put_into(name):
    """The derivative of log at 0, which ``where(valid, log(x), 0)`` and ``masked_fill(~valid, 0)`` do not keep away."""
    x, valid = torch.tensor([0.0, 1.0]), torch.tensor([False, True])
    logs = node("Log", (2,), Leaf("Net#0 output", x), self=x)
    kept = node("Where", (2,), logs, None, condition=valid)
    filled = node("MaskedFill", (2,), logs, mask=~valid)
    done = gradients(node("Sum", (), kept if name == "where" else filled), 0.0)

    assert [bad for _, bad, _ in done.bad_gradients] == [NAN]
    assert not done.bad_outputs


@pytest.mark.parametrize(("positions", "signs"), [((0, None), 1.0), ((None, 0), -1.0)])
def test_what_is_taken_from_a_constant_has_the_other_sign(positions, signs):
    less = node("Sub", (2,), *(Leaf("Net#0 output", torch.ones(2)) if p == 0 else None for p in positions), alpha=1)
    done = gradients(node("Sum", (), less), 0.0)
    ((_, gradient),) = done.output_gradients

    assert gradient.tolist() == [signs, signs]


def test_where_the_constant_counts_the_value_is_taken_as_it_was_saved():
    """exp(x - 200) does not overflow; exp(x), all that is known of what went in, would."""
    x = torch.tensor([150.0, 180.0])
    small = node("Sub", (2,), Leaf("Net#0 output", x), None, alpha=1)
    done = gradients(node("Sum", (), node("Exp", (2,), small, result=torch.exp(x - 200.0))), 2e-9)

    assert not done.bad_gradients and not done.bad_outputs
    assert (done.compared, done.bad) == (1, [])


@pytest.mark.parametrize(("cut", "outcome"), [(True, "outside"), (False, "origin")], ids=["cut", "whole"])
def test_of_code_too_long_to_be_kept_nothing_is_said_to_come_from_outside(cut, outcome):
    """What the logarithm read was made in a part of the graph that was not kept, or by nobody autograd knows."""
    logs = node("Log", (2,), None, self=torch.tensor([torch.nan, 1.0]))
    graph = LossGraph(0, node("Sum", (), logs), torch.tensor(torch.nan), None, cut=cut)
    done = _loss_code(types.SimpleNamespace(losses=[graph], taken=[]), "forward", "finite outputs", values=True)

    assert done.outcome == outcome


def test_an_exponential_is_no_origin_of_nan():
    """``exp(z - top)``: sub saves nothing and exp its result only; of a number that is never NaN."""
    leaf = Leaf("Net#0 output", torch.ones(2))
    filled = node("MaskedFill", (2,), leaf, mask=torch.tensor([True, False]))
    weights = node("Exp", (2,), node("Sub", (2,), filled, filled), result=torch.tensor([torch.nan, 1.0]))
    found = run(node("Sum", (), weights), torch.nan).slice()

    assert found.origins == ()
    assert [e for e, _ in found.externals] == [External("unknown")]


def test_an_exponential_that_is_infinite_may_be_one():
    leaf = Leaf("Net#0 output", torch.ones(2))
    weights = node("Exp", (2,), node("Sub", (2,), leaf), result=torch.tensor([torch.inf, 1.0]))
    done = run(node("Sum", (), weights), torch.inf)

    assert [done.tracer.records[i].op for i in done.slice().origins] == ["aten.exp.default"]


def test_a_bad_weight_that_no_module_has_is_a_weight_from_before():
    weight = torch.tensor([torch.nan, 1.0])
    done = run(node("Sum", (), node("Mul", (2,), Leaf("weight", weight), None, other=torch.ones(2))), torch.nan)

    assert {e for e, _ in done.slice().externals} == {External("weight", "weight")}
