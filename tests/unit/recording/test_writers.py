"""Which ops wrote a tensor's values, if it was filled part by part."""

from __future__ import annotations

import torch

from precdoctor.recording.microscope import writers as rooms
from precdoctor.recording.microscope.writers import Writers


def filled(bad, columns=4, dtype=torch.float32):
    """A tensor made by op 0, column ``j`` of which op ``j + 1`` has written; those of ``bad`` are NaN."""
    writers, x = Writers(), torch.full((3, columns), torch.nan, dtype=dtype)
    writers.made(x, 0)
    for j in range(columns):
        x[:, j] = torch.nan if j in bad else 1.0
        writers.wrote(x[:, j], j + 1)
    return writers, x


def test_only_the_writers_of_nonfinite_values_are_blamed():
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn):
        writers, x = filled(bad=(1,), dtype=dtype)
        assert writers.of(x) == (2,)
        assert writers.of(x[:, :2]) == (2,)
        assert writers.of(x[:, 2:]) == (0, 1, 2, 3, 4), "all that wrote to the memory of finite values"


def test_a_part_that_no_op_wrote_is_its_makers():
    writers, x = filled(bad=(), columns=4)
    longer = torch.full((3, 5), torch.nan)
    writers.made(longer, 7)
    longer[:, 1:] = x
    writers.wrote(longer[:, 1:], 8)
    assert writers.of(longer) == (7,)
    assert writers.of(longer[:, 1:]) == (7, 8), "it is finite"


def test_a_part_of_a_tensor_from_before_the_trace():
    writers, queue = Writers(), torch.zeros(4, 8)
    assert writers.of(queue) == ()
    queue[2] = torch.nan
    writers.wrote(queue[2], 5)
    assert writers.of(queue) == (5,)
    queue[2], queue[3] = 1.0, torch.nan
    assert writers.of(queue) == (), "the NaN was there before"


def test_writing_all_of_it_forgets_who_wrote_before():
    writers, x = filled(bad=(1,))
    x.fill_(torch.inf)
    writers.wrote(x, 9)
    assert writers.of(x) == writers.all_of(x) == (9,)
    writers.forget(x)
    assert writers.of(x) == writers.all_of(x) == ()


def test_a_view_as_another_dtype_has_the_writers_of_all_parts():
    writers, x = filled(bad=(1,))
    assert writers.of(x.view(torch.int16)) == (0, 1, 2, 3, 4)


def test_of_large_tensors_only_the_last_writers_are_kept(monkeypatch):
    monkeypatch.setattr(rooms, "_MAX_ELEMENTS", 8)
    monkeypatch.setattr(rooms, "_MAX_WRITERS", 3)
    writers, x = filled(bad=(1,))
    assert writers.of(x) == writers.all_of(x) == (2, 3, 4)
    small = torch.full((8,), torch.nan)
    writers.wrote(small[:2], 6)
    writers.made(small, 7)  # gives the room back
    writers.wrote(small[2:], 8)
    assert (writers.of(small[:2]), writers.of(small[2:])) == ((7,), (8,))
