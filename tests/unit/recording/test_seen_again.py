"""A tensor that several modules hand on is measured once, and nobody can tell that from the rows."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from precdoctor.recording import kernels
from precdoctor.recording.kernels import native_cpu
from precdoctor.recording.kernels import row_layout as at

pytestmark = pytest.mark.skipif(native_cpu.library() is None, reason="no compiled kernel")
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def no_slots_left_over():
    kernels.forget_all()
    yield
    kernels.forget_all()


@pytest.fixture
def copied(monkeypatch):
    """How often a row was taken from another slot, and how often not although that looked worth a try."""
    outcomes = []
    lib = native_cpu.library()

    class Counting:
        def __getattr__(self, name):
            return getattr(lib, name)

        def precdoctor_again(self, *arguments):
            outcomes.append(lib.precdoctor_again(*arguments))
            return outcomes[-1]

    counting = Counting()
    monkeypatch.setattr(native_cpu, "library", lambda: counting)
    return outcomes


def sample(dtype: torch.dtype, rows: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(rows, 128, generator=generator) * 3).to(dtype)


def row(slot: int, *, but_order: bool = True) -> list[int]:
    """Every column of a slot as bits."""
    ints, floats = kernels.bank(CPU).row(slot)
    ints = ints.clone()
    if but_order:
        ints[at.ORDER] = ints[at.FIRST_BAD_ORDER] = 0
    return [*ints.tolist(), *floats.view(torch.int64).tolist()]


def measured_alone(x: torch.Tensor, slot: int = 0) -> list[int]:
    kernels.forget_all()
    kernels.stat(x.clone(), slot)
    return row(slot)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [False, True])
def test_the_row_of_a_tensor_handed_on_is_that_of_measuring_it(dtype, bad, copied):
    x = sample(dtype)
    if bad:
        x[7, 5] = math.nan
    for slot in (0, 1, 2):
        kernels.stat(x, slot)
    assert copied == [1, 1]
    rows = [row(slot) for slot in (0, 1, 2)]
    orders = [kernels.bank(CPU).row(slot)[0][[at.ORDER, at.FIRST_BAD_ORDER]].tolist() for slot in (0, 1, 2)]
    assert rows[0] == rows[1] == rows[2] == measured_alone(x)
    assert orders == [[n, n if bad else at.NEVER] for n in (1, 2, 3)]


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_change_nothing(threads, copied):
    x, before = sample(torch.float32, 4000), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernels.stat(x, 0)
        kernels.stat(x, 1)
        assert copied == [1]
        assert row(1) == measured_alone(x)
    finally:
        torch.set_num_threads(before)


def test_it_adds_to_what_a_slot_holds(copied):
    x, other = sample(torch.float32), sample(torch.float32) * 7
    kernels.stat(other, 1)
    kernels.stat(x, 0)
    kernels.stat(x, 1)
    assert copied == [1]
    found = row(1)
    kernels.forget_all()
    kernels.stat(other.clone(), 1)
    kernels.stat(x.clone(), 1)
    assert found == row(1)


def test_memory_that_was_written_to_is_measured_whoever_wrote(copied):
    """Here neither torch's version counter nor anybody else tells of it."""
    x = sample(torch.float32)
    kernels.stat(x, 0)
    ctypes.memset(x.data_ptr() + 4 * 5001, 0, 4)
    kernels.stat(x, 1)
    assert copied == [0]
    assert row(0) != row(1) == measured_alone(x)


def test_a_slot_that_holds_more_than_the_tensor_is_no_source(copied):
    x = sample(torch.float32)
    kernels.stat(x, 0)
    kernels.stat(sample(torch.float32), 0)
    kernels.stat(x, 1)
    assert not any(copied)
    assert row(1) == measured_alone(x)


def test_another_shape_or_dtype_of_the_same_bytes_is_another_tensor(copied):
    x = sample(torch.float32)
    others = [x, x.view(-1), x.view(torch.float64), x.t()]
    for slot, y in enumerate(others):
        kernels.stat(y, slot)
    assert copied == []
    rows = [row(slot) for slot in range(len(others))]
    assert rows == [measured_alone(y) for y in others]


def test_what_a_slot_knows_of_a_cast_or_an_update_stays_there(copied):
    x = sample(torch.float32)
    kernels.stat(x, 0)
    ints, _ = kernels.bank(CPU).row(0)
    ints[at.SATURATED] = 7
    ints[at.REL : at.REL + at.REL_BINS] = 3
    kernels.stat(x, 1)
    assert copied == [1]
    assert row(1) == measured_alone(x)


def test_block_histograms_are_not_taken_from_a_slot_without_them(copied):
    x = sample(torch.float32)
    kernels.stat(x, 0)
    kernels.want_block16(1)
    kernels.stat(x, 1)
    assert copied == []
    assert kernels.bank(CPU).row(1)[0][at.block_hist(16) :][: at.BLOCK_BINS].sum() > 0


def test_nothing_is_taken_from_the_step_before(copied):
    x = sample(torch.float32)
    kernels.stat(x, 0)
    kernels.bank(CPU).snapshot(1).release()
    kernels.stat(x, 1)
    assert copied == []
    assert row(1) == measured_alone(x)


def test_memory_that_another_tensor_has_by_now_is_not_read_twice(copied):
    """Allocators hand out the same memory again and again: a few of its bytes tell."""
    memory = torch.empty(300, 128)
    for slot in range(4):
        memory.copy_(sample(torch.float32) + slot)
        kernels.stat(memory, slot)
    assert copied == [0, 0, 0]
    assert row(3) == measured_alone(memory)


def test_a_small_tensor_is_just_measured(copied):
    x = torch.randn(64, 64)
    kernels.stat(x, 0)
    kernels.stat(x, 1)
    assert copied == []
    assert row(0) == row(1)
