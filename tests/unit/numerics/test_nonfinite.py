"""Which operations can make a non-finite value, held against what torch computes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.numerics.nonfinite import _BOUNDED, _NAN_OF_NAN, NAN, NEG_INF, POS_INF, can_make

#: Functions of one tensor among them, by their names in aten.
UNARY = sorted(
    name
    for name in _NAN_OF_NAN | _BOUNDED
    if hasattr(torch.ops.aten, name)
    and any(
        [str(a.type) for a in getattr(getattr(torch.ops.aten, name), o)._schema.arguments if not a.has_default_value()]
        == ["Tensor"]
        for o in getattr(torch.ops.aten, name).overloads()
    )
)
NUMBERS = st.floats(width=16) | st.sampled_from([math.inf, -math.inf, 0.0, -0.0, 65504.0, -65504.0])


@pytest.mark.parametrize(
    "dtype", [torch.float16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.bfloat16))]
)
@pytest.mark.parametrize("name", UNARY)
@settings(max_examples=30, deadline=None)
@given(values=st.lists(NUMBERS.filter(lambda x: not math.isnan(x)), min_size=1, max_size=4))
def test_no_number_and_no_infinity_gives_what_cannot_be_made(name, dtype, values):
    try:
        found = getattr(torch.ops.aten, name)(torch.tensor([values], dtype=dtype))
    except (RuntimeError, NotImplementedError):
        return  # no kernel
    results = [x for x in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(x, torch.Tensor)]
    for x in results if results[0].is_floating_point() else ():
        if not can_make(name, NAN):
            assert not x.isnan().any()
        if not can_make(name, POS_INF):
            assert not x.isinf().any()


def test_the_table_speaks_of_functions_of_one_tensor_at_all():
    assert {"exp", "sigmoid", "tanh", "relu", "abs", "square", "sin"} <= set(UNARY)


@pytest.mark.parametrize(
    ("name", "kinds", "possible"),
    [
        ("exp", POS_INF, True),
        ("exp", NAN, False),
        ("exp", NAN | POS_INF, False),
        ("tanh", NEG_INF, False),
        ("sin", NAN, True),
        ("relu", NAN, False),
        ("leaky_relu", NAN, True),
        ("_softmax", NAN, True),
        ("_softmax", POS_INF, False),
        ("log", NAN | NEG_INF, True),
        ("sub", NAN, True),
        ("masked_fill", NAN, True),
        ("expand", NAN, False),
        ("an_op_nobody_knows", NAN, True),
    ],
)
def test_what_can_be_made(name, kinds, possible):
    assert can_make(name, kinds) is possible


def test_leaky_relu_without_a_slope_makes_nan_of_minus_infinity():
    assert torch.nn.functional.leaky_relu(torch.tensor(-math.inf), 0.0).isnan() and can_make("leaky_relu", NAN)
