"""A closer look at one op: which of several results it speaks of."""

import pytest
import torch

from precdoctor.recording.ops.op_facts import closer_look


def backward_of_convolution(grad, x, weight, mask):
    args = (grad, x, weight, [2], [1], [0], [1], False, [0], 1, mask)
    func = torch.ops.aten.convolution_backward.default
    made = [r for r in func(*args) if r is not None]
    return closer_look(func, args, {}, {}, made, values=True)


def described(func, args, made):
    return closer_look(func, args, {}, {}, made, values=True)


def test_the_result_in_fp64_is_that_of_the_one_that_went_wrong():
    grad = torch.full((1, 2, 300), 300.0, dtype=torch.half)
    x = torch.full((1, 1, 300), 2.0, dtype=torch.half)
    weight = torch.full((2, 1, 1), 0.5, dtype=torch.half)
    for mask in ([True, True, True], [False, True, True]):
        seen = backward_of_convolution(grad, x, weight, mask)
        assert [r["pos_inf"] for r in seen["results"]] == [0] * mask[0] + [2, 2]
        assert seen["reference"]["amax"] == 300 * 300 * 2  # of the weight's gradient, as the shape says
        assert seen["reference"]["shape"] == [2, 1, 1]


def test_the_result_in_fp64_of_a_healthy_op_is_its_first():
    grad, x, weight = torch.ones(1, 2, 4), torch.ones(1, 1, 4), torch.ones(2, 1, 1)
    assert backward_of_convolution(grad, x, weight, [True, True, True])["reference"]["shape"] == [1, 1, 4]


@pytest.mark.parametrize("divide", [torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor])
@pytest.mark.parametrize("counts", [torch.tensor([2, 0, 1]), torch.tensor([True, False, True])])
def test_what_a_division_divides_by_is_described_although_it_holds_integers(divide, counts):
    """The number of elements that a mask keeps."""
    sums = torch.tensor([3.0, 0.0, 1.0])
    facts = described(divide, (sums, counts), [sums / counts])
    (divisor,) = facts["integers"]
    assert (divisor["argument"], divisor["zero"], divisor["value"]) == ("other", 1, 0.0)
    assert divisor["dtype"] == str(counts.dtype).removeprefix("torch.")
    assert "integers" not in described(divide, (sums, sums), [sums / sums])
