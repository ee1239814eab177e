"""Rows in memory give the frames that Arrow would give, and a frame belongs to who asked for it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.diagnosis.survey.arrow_rows import KeptRows
from precdoctor.runlog.filters import query
from precdoctor.runlog.schema import TENSORS

_NAMES = ("step", "kind", "module", "name", "numel", "saturated", "amax", "scale", "shape", "exp_lo", "exp_hist")
_COLUMNS = pa.schema([TENSORS.field(name) for name in _NAMES])
_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "step": st.integers(0, 5),
            "kind": st.sampled_from(["output", "weight", "update"]),
            "module": st.sampled_from(["", "up", "down"]),
            "name": st.none() | st.sampled_from(["weight", "bias"]),
            "numel": st.integers(0, 1 << 40),
            "saturated": st.none() | st.integers(0, 1 << 40),
            "amax": st.none() | st.sampled_from([0.0, 1.5, 2.0**-40]),
            "scale": st.none() | st.just(65536.0),
            "shape": st.none() | st.lists(st.integers(1, 9), max_size=3),
            "exp_lo": st.none() | st.integers(-149, 127),
            "exp_hist": st.none() | st.lists(st.integers(0, 1 << 40), max_size=4),
        }
    ),
    max_size=12,
)
_TERMS = st.tuples(
    st.sampled_from([("kind", "in", ["output", "update"]), ("kind", "==", "weight"), ("kind", "in", [])]),
    st.sampled_from([("step", ">=", 2), ("amax", ">", 0.0), ("name", "not in", ["bias"]), ("module", "==", "up")]),
)


@given(_ROWS, _TERMS, st.permutations(_NAMES), st.integers(1, len(_NAMES)))
@settings(max_examples=80, deadline=None)
def test_rows_give_the_frame_that_arrow_gives(rows, terms, names, count) -> None:
    batch = pa.RecordBatch.from_pylist(rows, _COLUMNS)
    asked = query("tensors", names[:count], [list(terms)])
    kept = KeptRows(batch)
    selected = asked.select(batch)
    for _ in range(2):  # what is converted once serves twice
        found = kept.select(asked)
        assert list(found.columns) == names[:count]
        for name in found.columns:
            _same(found[name], selected.column(name))
    everything = query("tensors", names[:count])
    pd.testing.assert_frame_equal(kept.select(everything), KeptRows(everything.select(batch)).select(everything))


def _same(found: pd.Series, column: pa.Array) -> None:
    """A name that is missing is NaN; numbers are integers where none is missing, as Arrow converts them."""
    if pa.types.is_dictionary(column.type):
        assert isinstance(found.dtype, pd.CategoricalDtype)
        assert [None if pd.isna(name) else name for name in found] == column.to_pylist()
    elif pa.types.is_list(column.type):
        assert pa.array(found).to_pylist() == column.to_pylist()
    else:
        expected = column.to_numpy(zero_copy_only=False)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found.to_numpy(), expected)


def test_what_is_done_to_a_frame_stays_in_it() -> None:
    kept = KeptRows(
        pa.RecordBatch.from_pylist([{"step": s, "kind": "output", "amax": 2.0} for s in range(3)], _COLUMNS)
    )
    asked = query("tensors", ["step", "amax"], [[("kind", "==", "output")]])
    changed = kept.select(asked)
    changed["amax"] *= 0.0
    changed.loc[0, "step"] = 7
    assert kept.select(asked)["amax"].tolist() == [2.0] * 3
    assert np.array_equal(kept.select(asked)["step"], [0, 1, 2])
