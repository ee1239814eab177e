"""Many tensors in one launch give what one after the other gives; by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch

from precdoctor.recording import kernels
from precdoctor.recording.kernels import batched, cuda, light_launch, native_cpu, reference
from precdoctor.recording.kernels import row_layout as at
from tests.support.kernels import measure_triton

with pytest.MonkeyPatch.context() as _patch:
    if not torch.cuda.is_available():
        _patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    triton_kernel = pytest.importorskip("precdoctor.recording.kernels.triton_kernel")
    triton_batch = pytest.importorskip("precdoctor.recording.kernels.triton_batch")

# What NumPy says, in the interpreter, of Inf and NaN.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    # of the interpreter of Triton before 3.3, with NumPy of today
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
FINGERPRINT = 8
DEVICE = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched."""
    # All of them through Triton, where they are counted.
    monkeypatch.setattr(light_launch.LightLaunch, "_observe", lambda launch, _, *given: launch._by_triton(*given))
    names = []
    for name in ("_stat", "_update", "_restart"):
        launch = getattr(triton_batch, name)
        monkeypatch.setattr(launch, "_jitted", Counting(launch._jitted, f"{name}_many", names))
    return names


class Counting:
    def __init__(self, kernel, name, names):
        self.kernel, self.name, self.names = kernel, name, names

    def __getitem__(self, grid):
        self.names.append(self.name)
        return self.kernel[grid]


def batch(bank, jobs, tables, want=at.BLOCK_SIZES):
    """Measure through tables; every launch must succeed."""
    mask = native_cpu.wanted(want) | FINGERPRINT
    for group, members in batched.grouped(
        jobs, lambda _, slot: bank.addresses(slot), lambda _: mask, cuda.stream_of
    ).items():
        assert cuda.measure_many(group, members, tables.of(group), bank.counter), cuda.failure()


def one_by_one(bank, jobs, want=at.BLOCK_SIZES):
    for job in jobs:
        if job.restart:
            bank.restart(job.slot)
        if job.before is None:
            measure_triton(job.x, *bank.row(job.slot), bank.counter, want)
        else:
            reference.measure_update(job.before, job.x, job.intended, *bank.row(job.slot), bank.counter)


def rows(bank, count):
    """Integer and float rows on the host, their scrap cleared."""
    ints = torch.stack([bank.row(slot)[0] for slot in range(count)]).cpu()
    floats = torch.stack([bank.row(slot)[1] for slot in range(count)]).cpu()
    for block in at.BLOCK_SIZES:
        ints[:, at.block_hist(block) + at.BLOCK_BINS] = 0
    ints[:, at.REL + at.REL_BINS] = 0
    return ints, floats


def assert_same(one, other, count):
    (ints, floats), (truth, true_floats) = rows(one, count), rows(other, count)
    assert torch.equal(ints, truth), (ints != truth).nonzero()
    assert torch.equal(floats[:, :2], true_floats[:, :2])
    assert torch.allclose(floats[:, 2:], true_floats[:, 2:], rtol=1e-5, atol=1e-5)
    assert int(one.counter) == int(other.counter)


def mixed():
    """Tensors of several dtypes, widths and layouts, some of them with what is rare."""
    torch.manual_seed(0)
    shapes = [(7,), (), (64, 48), (130,), (2, 3, 3), (40, 96), (3000,), (1, 16)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64, torch.float16]
    tensors = []
    for i in range(9):
        x = torch.randn(shapes[i % len(shapes)], dtype=torch.float64) * 2.0 ** (i - 9)
        if i % 3 == 1:
            x.view(-1)[0] = (math.nan, math.inf, -math.inf)[i % 4 % 3]
        tensors.append(x.to(dtypes[i % len(dtypes)]).to(DEVICE))
    tensors += [tensors[2].t(), torch.randn(4, 6, 50, device=DEVICE).transpose(0, 1), tensors[6][1:]]
    return tensors


@pytest.mark.parametrize("want", [(), at.BLOCK_SIZES], ids=["values", "blocks"])
def test_a_batch_counts_what_single_launches_count(launched, want):
    here, there = kernels.Bank(DEVICE), kernels.Bank(DEVICE)
    tensors, tables = mixed(), batched.Tables()
    assert all(triton_kernel.supports(x, 15) for x in tensors)
    by_group = batched.grouped(
        [batched.Job(x, slot) for slot, x in enumerate(tensors)],
        lambda _, slot: here.addresses(slot),
        lambda _: native_cpu.wanted(want) | FINGERPRINT,
        cuda.stream_of,
    )
    order = [member.job for members in by_group.values() for member in members]
    batch(here, order, tables, want)
    assert launched == ["_stat_many"] * len(by_group)
    one_by_one(there, order, want)
    assert_same(here, there, len(tensors))
    assert rows(here, len(tensors))[0][:, at.ORDER].sort().values.tolist() == list(range(1, len(tensors) + 1))


def test_tensors_of_one_kind_are_one_launch_and_tables_stay_while_pointers_do(launched):
    bank, tables = kernels.Bank(DEVICE), batched.Tables()
    tensors = [torch.randn(2, 8 + i % 2 * 8, device=DEVICE) for i in range(6)]
    jobs = [batched.Job(x, slot) for slot, x in enumerate(tensors)]
    for _ in range(3):
        batch(bank, jobs, tables, ())
    assert launched == ["_stat_many"] * 3
    (table,) = tables._tables.values()
    lay, owners = table.rows.data_ptr(), table.owners.data_ptr()
    assert table.writes == 1
    tensors[5] = tensors[5].clone()
    batch(bank, [batched.Job(x, slot) for slot, x in enumerate(tensors)], tables, ())
    assert table.writes == 2
    assert (table.rows.data_ptr(), table.owners.data_ptr()) == (lay, owners), "written again where it was"
    ints, _ = rows(bank, 6)
    assert set(ints[:, at.LAUNCHES].tolist()) == {4}
    assert ints[:, at.NUMEL].tolist() == [4 * x.numel() for x in tensors]
    assert int(bank.counter) == 24
    assert int(table.done) == 0
    batch(bank, jobs[:3], tables, ())  # some gradients may be missing in a step
    batch(bank, jobs, tables, ())
    assert set(rows(bank, 6)[0][:3, at.LAUNCHES].tolist()) == {6}


def test_a_slot_starts_anew_but_for_when_it_was_first_bad(launched):
    here, there = kernels.Bank(DEVICE), kernels.Bank(DEVICE)
    tables, x = batched.Tables(), torch.randn(5, 100, device=DEVICE)
    x[2, 3] = math.inf
    for values in (x, x.nan_to_num(posinf=1.0), x):
        jobs = [batched.Job(values, slot, restart=True) for slot in (0, 1)]
        batch(here, jobs, tables)
        one_by_one(there, jobs)
    assert launched == ["_restart_many", "_stat_many"] * 3
    assert_same(here, there, 2)
    ints, _ = rows(here, 2)
    assert ints[:, at.FIRST_BAD_ORDER].tolist() == [1, 2]
    assert ints[:, at.ORDER].tolist() == [5, 6]


@pytest.mark.filterwarnings("ignore:invalid value")  # what NumPy says of Inf - Inf, in the interpreter
@pytest.mark.parametrize(
    ("dtype", "intended"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float64), (torch.float8_e4m3fn, torch.float32)],
    ids=str,
)
def test_updates_count_what_the_reference_counts(launched, dtype, intended):
    torch.manual_seed(1)
    here, there, jobs = kernels.Bank(DEVICE), kernels.Bank(DEVICE), []
    for slot, shape in enumerate([(3, 130), (8, 32), (17,), ()]):
        before = (torch.randn(shape) * 2.0 ** torch.randint(-20, 4, shape)).to(dtype)
        step = torch.randn(shape).mul(1e-3).to(intended)
        flat, steps = before.view(-1), step.view(-1)
        if flat.numel() > 9:
            flat[:3] = torch.tensor([0.0, math.nan, math.inf]).to(dtype)
            steps[2:7] = torch.tensor([math.nan, math.inf, 0.0, 1e-42, 1e30]).to(intended)
        after = (before.double() + step.double().nan_to_num()).to(dtype)
        jobs.append(batched.Job(after.to(DEVICE), slot, False, before.to(DEVICE), step.to(DEVICE)))
    assert all(cuda.updates_fit(job.before, job.x, job.intended) for job in jobs)
    batch(here, jobs, batched.Tables())
    assert set(launched) == {"_update_many"} and len(launched) <= 2  # of aligned rows and of others
    order = [
        m.job
        for ms in batched.grouped(jobs, lambda _, slot: here.addresses(slot), lambda _: 0, cuda.stream_of).values()
        for m in ms
    ]
    one_by_one(there, order)
    for job in jobs:
        there.row(job.slot)[0][at.FINGERPRINT] = 0  # nobody asks for one of an update
    assert_same(here, there, len(jobs))
    assert rows(here, len(jobs))[0][:, at.UNCHANGED].sum() > 0 or dtype == torch.float32


def test_what_updates_do_not_fit():
    x, wide = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float64)
    assert cuda.updates_fit(x, x, wide)
    assert not cuda.updates_fit(wide, wide, wide)
    assert not cuda.updates_fit(x, x.t(), x)
    assert not cuda.updates_fit(x, x, x.bfloat16())
