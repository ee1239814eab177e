"""A filter in words selects what Arrow selects for the expression that says the same."""

from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.runlog.filters import query, table_schema

_COLUMNS = ("step", "rank", "kind", "phase", "order", "amax", "fingerprint", "attempt")
_TYPES = {name: table_schema("tensors").field(name).type for name in _COLUMNS}
_VALUES = {
    "step": st.integers(0, 3),
    "rank": st.just(0),
    "kind": st.sampled_from(["output", "weight", "loss"]),
    "phase": st.sampled_from(["train", "no_grad", None]),
    "order": st.one_of(st.none(), st.integers(-2, 2)),
    "amax": st.sampled_from([None, 0.0, -0.0, 1.5, float("nan"), float("inf")]),
    "fingerprint": st.one_of(st.none(), st.integers(0, 3)),
    "attempt": st.just(0),
}
_COMPARISONS = {
    "==": lambda c, v: c == v,
    "!=": lambda c, v: c != v,
    "<": lambda c, v: c < v,
    "<=": lambda c, v: c <= v,
    ">": lambda c, v: c > v,
    ">=": lambda c, v: c >= v,
}
_NAMES = st.sampled_from(_COLUMNS)
_TERMS = _NAMES.flatmap(
    lambda n: st.tuples(st.just(n), st.sampled_from(list(_COMPARISONS)), _VALUES[n])
) | _NAMES.flatmap(lambda n: st.tuples(st.just(n), st.sampled_from(["in", "not in"]), st.lists(_VALUES[n], max_size=3)))
_ROWS = st.lists(st.fixed_dictionaries(_VALUES), max_size=8)


def _array(values: list, kind: pa.DataType) -> pa.Array:
    return (
        pa.array(values, kind.value_type).dictionary_encode()
        if pa.types.is_dictionary(kind)
        else pa.array(values, kind)
    )


def _expression(name: str, operator: str, value: object) -> pc.Expression:
    if operator in _COMPARISONS:
        return _COMPARISONS[operator](pc.field(name), value)
    plain = _TYPES[name].value_type if pa.types.is_dictionary(_TYPES[name]) else _TYPES[name]
    among = pc.field(name).isin(pa.array(value, plain))
    return among if operator == "in" else ~among


@settings(deadline=None, max_examples=60)
@given(_ROWS, st.lists(st.lists(_TERMS, max_size=3), min_size=1, max_size=3))
def test_words_select_what_the_expression_selects(rows, alternatives):
    arrays = [_array([row[name] for row in rows], kind) for name, kind in _TYPES.items()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(_COLUMNS))
    terms = [reduce(lambda a, b: a & b, (_expression(*t) for t in all_of), pc.scalar(True)) for all_of in alternatives]
    expected = pa.Table.from_batches([batch]).filter(reduce(lambda a, b: a | b, terms))
    asked = query("tensors", _COLUMNS, alternatives)
    assert repr(asked.select(batch).to_pylist()) == repr(expected.to_pylist())
