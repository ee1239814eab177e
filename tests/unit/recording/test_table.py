"""The columns of a step are the rows that reading slot by slot would give."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precdoctor.recording import kernels
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.output.tensor_table import Sites, StepTensors
from precdoctor.recording.slots.cast_operand import FLOAT8, Operand, launcher
from precdoctor.recording.slots.slot_table import Site, SlotTable
from precdoctor.recording.slots.step_batch import StepBatch, StepFacts
from precdoctor.runlog.schema import KINDS
from precdoctor.runlog.writer import build_batch
from tests.support.reference_rows import tensor_rows

CPU = torch.device("cpu")

VALUES = st.sampled_from([0.0, -0.0, 1.0, -3.0, 448.0, 1e-42, 65504.0, 3e38, math.inf, -math.inf, math.nan, 2.0**-20])
TENSORS = st.lists(VALUES, min_size=1, max_size=40).map(torch.tensor)
SITES = st.builds(
    Site,
    st.builds(Place, st.sampled_from(["A#0", "B#0"]), st.sampled_from(["", "fc", "caf\udce9"]), st.just("Linear")),
    st.sampled_from(KINDS),
    st.sampled_from(["", "weight"]),
    st.sampled_from([0, 1, 15]),
    st.sampled_from(["train", "no_grad"]),
    st.sampled_from(["float32", "bfloat16"]),
)
OPERANDS = st.builds(
    Operand,
    st.sampled_from(sorted(FLOAT8.values(), key=lambda f: f.name)),
    st.none() | st.lists(st.tuples(st.sampled_from([448.0, 0.5, 0.0]), st.booleans()), max_size=3).map(tuple),
    st.booleans(),
)
LAUNCHES = st.tuples(SITES, TENSORS, st.booleans(), st.none() | OPERANDS)


@pytest.fixture(autouse=True)
def no_slots_left_over():
    kernels.forget_all()
    yield
    kernels.forget_all()


def finish(slots: SlotTable, facts: StepFacts) -> StepBatch:
    return StepBatch(facts, slots.take(), {CPU: kernels.bank(CPU).snapshot(len(slots))})


def launch(
    slots: SlotTable, site: Site, x: torch.Tensor, *, scaled: bool = False, operand: Operand | None = None
) -> None:
    entry = slots.entry(site, CPU)
    entry.shape, entry.scaled = tuple(x.shape), scaled
    x = x.bfloat16() if site.dtype == "bfloat16" else x
    if site.kind == "update":
        kernels.update(x, x + 1, torch.full_like(x, 1e-3, dtype=torch.float32), entry.slot)
    elif operand is not None and site.kind == "fp8_operand":
        launcher(operand.fmt)(x, entry.slot)
        entry.operand = operand
    else:
        kernels.stat(x, entry.slot)


@settings(deadline=None)
@given(st.data())
def test_columns_are_those_of_the_slow_reference(data):
    kernels.forget_all()
    slots, sites = SlotTable(), Sites()
    for number in range(data.draw(st.integers(1, 3))):
        facts = StepFacts(number, micro_starts=[{CPU: data.draw(st.integers(0, 6))}], sampled=True)
        for site, x, scaled, operand in data.draw(st.lists(LAUNCHES, max_size=12)):
            launch(slots, site, x, scaled=scaled, operand=operand)
        if data.draw(st.booleans()):  # a tensor that was announced and never measured
            slots.entry(data.draw(SITES), CPU)
        scale = data.draw(st.none() | st.just(1024.0))
        batch = finish(slots, facts)
        launched = [e for e in batch.entries if batch.snapshots[CPU].ints(np.array([e.slot]), 1, 2).any()]
        expected = tensor_rows(dataclasses.replace(batch, entries=launched), 3, scale)
        table = StepTensors(batch, 3, sites)
        assert table.rows == len(expected)
        if expected:
            columns = {name: [row.get(name) for row in expected] for name in {k for row in expected for k in row}}
            columns = {k: [list(v) if isinstance(v, np.ndarray) else v for v in c] for k, c in columns.items()}
            written = build_batch("tensors", table.columns(scale), table.rows)
            written.validate(full=True)
            # in text, where a NaN equals a NaN
            assert str(written.to_pylist()) == str(build_batch("tensors", columns, len(expected)).to_pylist())


def test_more_slots_than_one_block_and_in_any_order():
    slots, sites = SlotTable(), Sites()
    place = Place("A#0", "fc", "Linear")
    for step in range(3):
        names = range(300) if step < 2 else range(299, 100, -7)
        for n in names:
            launch(slots, Site(place, "output", f"{n}", 0, "train", "float32"), torch.full((2,), float(n)))
        batch = finish(slots, StepFacts(step))
        table = StepTensors(batch, 0, sites)
        columns = table.columns(None)
        assert columns["name"].to_pylist() == [str(n) for n in names]
        assert columns["amax"].to_pylist() == [float(n) for n in names]


def test_two_threads_of_autograd_are_given_different_slots():
    """One per device: both may meet a tensor for the first time."""
    meeting = threading.Barrier(2)

    class Shared(dict):
        def __len__(self):
            number = super().__len__()
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)  # both are here, unless one has to wait until the other is done
            return number

    slots, place = SlotTable(), Place("A#0", "fc", "Linear")
    slots._slots = Shared()
    found = []

    def enter(name):
        found.append(slots.entry(Site(place, "weight_grad", name, 0, "train", "float32"), CPU).slot)

    threads = [threading.Thread(target=enter, args=(name,)) for name in ("weight", "bias")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1]


def test_what_steps_rows_are_made_from():
    slots = SlotTable()
    fc, head = Place("A#0", "fc", "Linear"), Place("A#0", "head", "Linear")

    def put(place, kind, *values):
        launch(slots, Site(place, kind, "weight", 0, "train", "float32"), torch.tensor(values))

    put(fc, "weight_grad", 3.0, -4.0)
    put(fc, "weight_grad_step", 0.25, 0.5)
    put(head, "weight_grad", 12.0)
    put(head, "output", math.inf)
    put(head, "weight", math.nan)
    table = StepTensors(finish(slots, StepFacts(0)), 0, Sites())
    assert table.unscale_ratios() == [8.0]
    assert table.weight_gradients([("A#0", "fc", "weight")]) == ([25.0], True)
    assert table.weight_gradients([("A#0", "fc", "weight"), ("A#0", "head", "weight")]) == ([25.0, 144.0], True)
    assert table.weight_gradients([("C#0", "", "")]) == ([], True)
    assert table.bad_triggers() == [("A#0", "head", "weight", "weight")]
    assert table.lost_updates() == (0, 0)
    assert not table.of_kinds("loss").any()


def test_a_step_without_tensors():
    table = StepTensors(StepBatch(StepFacts(0), [], {}), 0, Sites())
    assert (table.rows, table.unscale_ratios(), table.bad_triggers(), table.lost_updates()) == (0, [], [], (0, 0))
    assert table.weight_gradients([("A#0", "", "")]) == ([], True)


def test_texts_are_stored_once():
    slots, sites = SlotTable(), Sites()
    for n in range(50):
        launch(slots, Site(Place("A#0", "fc", "Linear"), "output", "", n, "train", "float32"), torch.ones(1))
    columns = StepTensors(finish(slots, StepFacts(0)), 0, sites).columns(None)
    assert isinstance(columns["root"], pa.StringArray)
    assert len(sites._texts) == len({"A#0", "fc", "Linear", "output", "", "train", "float32"})
