"""The two numbers of every step: exact about what is finite, close about the norm."""

import math

import pytest
import torch
from torch import nn

from precdoctor.recording.sentinel import Look, gradient_sentinel


def with_gradients(*gradients: torch.Tensor) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def test_norm_and_amax_are_those_of_all_gradients_together():
    a, b = torch.randn(100, 7, dtype=torch.float64), torch.randn(33).to(torch.bfloat16)
    norm, amax = gradient_sentinel(with_gradients(a, b))
    both = torch.cat([a.flatten(), b.double()])
    assert float(norm) == pytest.approx(float(both.norm()), rel=1e-6)
    assert float(amax) == float(both.abs().max())


def test_half_precision_gradients_do_not_overflow_their_norm():
    norm, amax = gradient_sentinel(with_gradients(torch.full((100,), 6e4, dtype=torch.float16)))
    assert float(norm) == pytest.approx(6e5, rel=1e-2)
    assert math.isfinite(float(amax))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_shows(bad):
    gradient = torch.randn(1000)
    gradient[77] = bad
    assert not math.isfinite(float(gradient_sentinel(with_gradients(torch.randn(3), gradient))[1]))


def test_squares_beyond_fp32_are_not_taken_for_inf():
    assert math.isfinite(float(gradient_sentinel(with_gradients(torch.full((3,), 1e30)))[1]))


def test_without_gradients_there_is_nothing():
    assert gradient_sentinel([nn.Parameter(torch.zeros(3))]) is None


def test_sparse_gradients_count_by_their_values():
    parameter = nn.Parameter(torch.zeros(5, 2))
    values = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    parameter.grad = torch.sparse_coo_tensor([[1, 1]], values, (5, 2), check_invariants=True)
    norm, amax = gradient_sentinel([parameter])
    assert (float(norm), float(amax)) == (5.0, 4.0)


def test_a_look_covers_the_gradients_it_was_taken_of_until_somebody_writes_to_one():
    parameters = with_gradients(torch.randn(3), torch.randn(4))
    look = Look.at(1.0, parameters)
    assert look.covers(parameters) and look.covers(parameters[:1])
    assert not look.covers([*parameters, *with_gradients(torch.randn(2))])
    parameters[1].grad.mul_(0.5)
    assert look.covers(parameters[:1]) and not look.covers(parameters)
    parameters[0].grad = torch.randn(3)
    assert not look.covers(parameters[:1])
