"""Which operand of a product is the data, what multiplied it, and what is remembered by memory alone."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from precdoctor.recording.fp8.provenance import History, bound, scaled
from precdoctor.recording.ops.storage_notes import Notes

X, ROW, COLUMN, ONE = torch.ones(4, 3), torch.ones(4, 1), torch.ones(3), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("a", "b", "divide", "factors"),
    [
        (X, ONE, False, ((2.0, False),)),
        (ONE, X, False, ((2.0, False),)),
        (X, 8, False, ((8.0, False),)),
        (X, ONE.reshape(1, 1), True, ((2.0, True),)),
    ],
)
def test_the_larger_operand_is_the_data(a, b, divide, factors):
    found = scaled(a, b, X, divide=divide)
    assert found is not None and found[0] is X and found[1] == factors


@pytest.mark.parametrize(
    ("a", "b", "divide", "by"), [(X, ROW, False, ROW), (ROW, X, False, ROW), (X, COLUMN, True, COLUMN)]
)
def test_numbers_per_row_or_column_are_given_as_they_are(a, b, divide, by):
    found = scaled(a, b, X, divide=divide)
    assert found is not None and found[0] is X and found[1] is by


def test_only_what_one_tensor_multiplied_by_parts_has_parts():
    history = History(None, None)
    once = history.by_parts(ROW, divide=True)
    assert once.factors is None and once.parts is not None and once.parts[0]() is ROW and once.parts[1]
    assert once.by_parts(COLUMN, divide=False).parts is None
    assert history.times(((2.0, False),)).by_parts(ROW, divide=False).parts is None
    assert once.times(((2.0, False),)).parts is None  # not all of what multiplied it


@pytest.mark.parametrize(
    ("a", "b", "result", "divide"),
    [
        (X, torch.ones(4, 3), X, False),  # a product of two
        (ONE, X, X, True),  # something over the data
        (ONE, 448.0, ONE, False),  # a scale in the making
        (torch.ones(4, 1), torch.ones(1, 3), X, False),  # an outer product
        (torch.ones(4, 3, dtype=torch.int32), 2.0, X, False),
    ],
)
def test_what_scales_nothing(a, b, result, divide):
    assert scaled(a, b, result, divide=divide) is None


@pytest.mark.parametrize(
    ("lower", "upper", "limit"),
    [
        (-448.0, 448.0, 448.0),
        (torch.tensor(-448.0), torch.tensor(448.0), 448.0),
        (-448.0, 240.0, None),
        (None, 448.0, None),
        (-torch.ones(3), torch.ones(3), None),
    ],
)
def test_symmetric_bounds(lower, upper, limit):
    assert bound(lower, upper) == limit


def test_views_share_a_note_and_new_memory_never_inherits_one():
    notes = Notes()
    x = torch.ones(8, 8)
    notes.put(x, "x")
    assert notes.get(x.t()) == notes.get(x[2:]) == notes.get(x.view(-1)) == "x"
    assert notes.get(x.clone()) is None
    del x
    gc.collect()
    assert all(notes.get(torch.ones(8, 8)) is None for _ in range(200))  # the address is not used again


def test_a_note_keeps_no_memory_alive():
    notes = Notes()
    x = torch.ones(4)
    notes.put(x, "x")
    memory = StorageWeakRef(x.untyped_storage())
    assert not memory.expired()
    del x
    gc.collect()
    assert memory.expired()
