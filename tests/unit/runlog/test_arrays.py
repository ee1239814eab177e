"""Arrow arrays built from buffers hold what Arrow itself would have put there."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.runlog import arrays

ELEMENTS = {
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.uint64(): st.integers(0, (1 << 64) - 1),
    pa.float64(): st.floats(allow_nan=False) | st.integers(-5, 5),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(),
}
LISTS = {pa.list_(kind): st.lists(element) for kind, element in ELEMENTS.items()}

pa.array([0])  # imports pandas, which takes longer than hypothesis waits


@given(st.data(), st.sampled_from([*ELEMENTS.items(), *LISTS.items()]))
def test_python_values(data, kind_and_element):
    kind, element = kind_and_element
    values = data.draw(st.lists(st.none() | element))
    array = arrays.column(values, kind)
    array.validate(full=True)
    assert array.equals(pa.array(values, kind))


@given(st.lists(st.integers(-9, 9)), st.data())
def test_numbers_of_numpy_and_their_nulls(values, data):
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), np.bool_)
    array = arrays.numbers(np.array(values, np.int64), valid)
    array.validate(full=True)
    assert array.to_pylist() == [v if ok else None for v, ok in zip(values, valid, strict=True)]


@given(st.lists(st.text(), min_size=1), st.data())
def test_chosen_texts_are_those_that_take_gives(texts, data):
    which = np.array(data.draw(st.lists(st.integers(0, len(texts) - 1))), np.int32)
    array = arrays.chosen([text.encode() for text in texts], which)
    array.validate(full=True)
    assert array.equals(pa.array(texts, pa.string()).take(pa.array(which)))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.5], pa.int64()),
        ([True], pa.int64()),
        ([1 << 63], pa.int64()),
        ([-1], pa.uint64()),
        (["1"], pa.float64()),
        ([1], pa.string()),
        ([["x"]], pa.list_(pa.int64())),
        (np.array([1.0]), pa.int64()),
        (np.array([[1]]), pa.list_(pa.int64())),
    ],
)
def test_values_of_another_type_are_left_to_arrow(values, kind):
    assert arrays.column(values, kind) is None


def test_what_is_not_text_is_not_hidden():
    with pytest.raises(UnicodeEncodeError):
        arrays.strings(["caf\udce9"])
