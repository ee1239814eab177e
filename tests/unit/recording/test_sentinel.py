"""The two numbers of every step: exact about what is finite, close about the norm."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording.kernels import native_cpu
from precdoctor.recording.kernels.list_layout import Layout
from precdoctor.recording.steps.sentinel import Look, _norms, gradient_sentinel

GENERATOR = torch.Generator().manual_seed(0)


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


@given(
    numbers=st.lists(st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 1e-45, 0.0]), min_size=1),
    size=st.integers(1, 5000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    turned=st.booleans(),
)
def test_one_pass_over_memory_finds_what_numpy_finds(numbers, size, dtype, turned):
    x = torch.tensor([*numbers, *[0.5] * size]).to(dtype)
    x = x[: x.numel() // 2 * 2].view(2, -1)
    x = x.t() if turned else x
    found = native_cpu.look([x, torch.full((3,), 0.25)])
    if found is None:
        pytest.skip("no compiled kernel here")
    wide = x.double().numpy()
    largest = float(np.abs(wide).max()) if wide.size else 0.0
    if math.isfinite(largest):
        assert found[0] == max(largest, 0.25)
        assert found[1] == pytest.approx(float((wide**2).sum()) + 3 / 16, rel=1e-12)
    else:
        assert not math.isfinite(found[0])
        assert math.isnan(found[0]) == math.isnan(largest)


def test_tensors_with_gaps_are_left_to_torch():
    gaps = torch.randn(8, 8)[:, ::2]
    assert native_cpu.look([torch.randn(4), gaps]) is None
    norm, amax = gradient_sentinel(with_gradients(gaps))
    assert (norm, amax) == (pytest.approx(float(gaps.norm()), rel=1e-5), float(gaps.abs().max()))


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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
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


class Ops(TorchDispatchMode):
    """Counts the operations that are dispatched, which on a device are launches or copies."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_on_a_device_300_gradients_take_a_handful_of_operations(dtype):
    gradients = [(torch.randn(5, 7, generator=GENERATOR) * 100).to(dtype) for _ in range(300)]
    with Ops() as ops:
        norm, amax = torch.linalg.vector_norm(_norms(gradients, 2.0)), _norms(gradients, math.inf).max()
    assert len(ops.names) <= 10, ops.names
    both = torch.cat([g.flatten() for g in gradients]).double()
    assert float(norm) == pytest.approx(float(both.norm()), rel=1e-5)  # FP16: their squares leave its range
    assert float(amax) == float(both.abs().max())


def test_on_a_device_each_dtype_is_a_group_and_float8_has_norms():
    gradients = [torch.full((3,), 2.0).to(d) for d in (torch.bfloat16, torch.float32, torch.float8_e4m3fn)] * 100
    with Ops() as ops:
        found = _norms(gradients, 2.0)
    assert len([n for n in ops.names if "float8" not in n and "_to_copy" not in n]) <= 5
    assert found.numel() == 300 and found.tolist() == pytest.approx([12**0.5] * 300)
    assert math.isnan(_norms([*gradients, torch.tensor([1.0, math.nan])], math.inf).max())


def test_gradients_that_are_not_plain_are_read_as_before():
    """One among many that is empty, sparse or of integers takes all of them on the slower way."""
    dense = torch.tensor([3.0, 4.0])
    sparse = torch.sparse_coo_tensor([[1]], [12.0], (4,), check_invariants=True)
    norm, amax = gradient_sentinel(with_gradients(dense, torch.empty(0), sparse))
    assert (float(norm), float(amax)) == (13.0, 12.0)


@pytest.fixture
def known():
    """What is known of a list of gradients that has been read once; skips where torch cannot tell that all at once."""
    layout, parameters = Layout(), with_gradients(torch.ones(2, 3), torch.ones(4))
    gradient_sentinel(parameters, layout)
    if layout.look([p.grad for p in parameters]) is None:
        pytest.skip("no compiled kernel here, or another torch")
    return layout


def test_gradients_like_those_of_the_step_before_are_asked_for_their_addresses_only(known, monkeypatch):
    monkeypatch.setattr(native_cpu, "look", None)
    parameters = with_gradients(torch.full((2, 3), 2.0), torch.full((4,), -3.0))
    parameters.insert(1, nn.Parameter(torch.zeros(5)))  # without a gradient
    assert gradient_sentinel(parameters, known) == (pytest.approx(60**0.5), 3.0)


OTHERS = {
    "shape": lambda: (torch.ones(3, 3), torch.ones(4)),
    "strides": lambda: (torch.ones(3, 2).t(), torch.ones(4)),
    "gaps": lambda: (torch.ones(2, 3), torch.ones(8)[::2]),
    "dtype": lambda: (torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16)),
    "fewer": lambda: (torch.ones(2, 3),),
    "more": lambda: (torch.ones(2, 3), torch.ones(4), torch.ones(1)),
    "sparse": lambda: (torch.ones(2, 3), torch.ones(4).to_sparse()),
    "class": lambda: (torch.ones(2, 3), torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {}))),
    "conjugate": lambda: (torch.ones(2, 3), torch.ones(4, dtype=torch.complex64).conj().real),
    "memory": lambda: (torch.ones(2, 3), given_back(torch.ones(4))),
}


def given_back(x):
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize("what", OTHERS)
def test_other_gradients_are_not_taken_for_those_of_the_step_before(what, known):
    others = OTHERS[what]()
    assert known.look(others) is None
    parameters = with_gradients(*others)
    assert gradient_sentinel(parameters, known) == gradient_sentinel(parameters)


def test_a_list_that_always_changes_is_not_learnt_for_ever(known):
    for size in range(1, 40):
        gradient_sentinel(with_gradients(torch.ones(size)), known)
    assert known.look([torch.ones(39)]) is None
