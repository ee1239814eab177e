"""The kernels on a CUDA device count what the CPU reference counts."""

import math

import pytest
import torch

from precdoctor.recording import kernels
from precdoctor.recording.kernels import cuda, reference
from precdoctor.recording.kernels import row_layout as at

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
RARE = [math.nan, math.inf, -math.inf, 0.0, 1e-40, 2.0**-149, 3.4e38, 448.0]


def rows(device):
    ints, floats = kernels.Bank(torch.device(device)).row(0)
    return ints.clone(), floats.clone(), torch.zeros((), dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 33), (2, 5, 130), (300, 257), (70001,)])
def test_the_device_counts_what_the_reference_counts(dtype, shape):
    x = torch.randn(shape, dtype=torch.float64)
    x.view(-1)[: min(len(RARE), x.numel())] = torch.tensor(RARE[: x.numel()], dtype=torch.float64)
    x = x.to(dtype)
    here, there = rows("cpu"), rows("cuda")
    reference.measure(x, *here, at.BLOCK_SIZES)
    reference.measure(x.cuda(), *there, at.BLOCK_SIZES)
    assert torch.equal(here[0], there[0].cpu())
    assert torch.equal(here[1][:2], there[1][:2].cpu())
    assert torch.allclose(here[1], there[1].cpu(), rtol=1e-9, equal_nan=True)


@pytest.fixture
def triton_bank():
    """The device's bank, fresh, where Triton is there to fill it."""
    pytest.importorskip("triton")
    kernels.forget_all()
    yield kernels.bank(torch.device("cuda", torch.cuda.current_device()))
    kernels.want_blocks(wanted=True)
    kernels.forget_all()


def row_of(bank, slot=0):
    """A slot on the host, its scrap cleared."""
    torch.cuda.synchronize()
    ints, floats = (t.cpu().clone() for t in bank.row(slot))
    for block in at.BLOCK_SIZES:
        ints[at.block_hist(block) + at.BLOCK_BINS] = 0
    return ints, floats


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "every second column": lambda x: x[..., ::2],
    "channels last": lambda x: x.view(*x.shape, *[1] * (4 - x.dim())).to(memory_format=torch.channels_last),
    "expanded": lambda x: x[..., :1].expand(x.shape),
}
CASES = [("contiguous", shape) for shape in [(), (7,), (70_001,)]]
CASES += [(name, shape) for name in LAYOUTS for shape in [(3, 33), (2, 5, 130), (300, 257)]]
CASES += [pytest.param("contiguous", (3_000_001,), marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
@pytest.mark.parametrize(("layout", "shape"), CASES)
@pytest.mark.parametrize("everything", [False, True], ids=["core", "blocks and fingerprint"])
def test_the_triton_kernel_counts_what_the_reference_counts(triton_bank, dtype, layout, shape, everything):
    x = torch.randn(shape, dtype=torch.float64)
    x.view(-1)[: min(len(RARE), x.numel())] = torch.tensor(RARE[: x.numel()], dtype=torch.float64)
    x = x.to(dtype)
    here, on_device = rows("cpu"), LAYOUTS[layout](x.cuda())
    kernels.want_blocks(wanted=everything)
    if everything:
        kernels.want_block16(0)
        kernels.want_fingerprint(0)
    for _ in range(2):
        reference.measure(LAYOUTS[layout](x), *here, at.BLOCK_SIZES if everything else ())
        kernels.stat(on_device, 0)
    assert cuda.failure() is None
    ints, floats = row_of(triton_bank)
    for block in at.BLOCK_SIZES:
        here[0][at.block_hist(block) + at.BLOCK_BINS] = 0
    if not everything:
        assert ints[at.FINGERPRINT] == 0, "nobody asked for one"
        here[0][at.FINGERPRINT] = 0
    assert torch.equal(ints, here[0]), (ints != here[0]).nonzero().flatten()
    assert torch.equal(floats[:2], here[1][:2])
    assert torch.allclose(floats, here[1], rtol=1e-5, atol=1e-3, equal_nan=True)


def test_a_captured_graph_counts_every_replay_in_order(triton_bank):
    x = torch.randn(100_000, device="cuda")
    for _ in range(3):  # capturing compiles nothing and makes no bank
        kernels.stat(x, 0)
    triton_bank.snapshot(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.stat(x, 0)
        kernels.stat(x, 1)
    graph.replay()
    x[77] = math.inf
    graph.replay()
    first, second = row_of(triton_bank, 0)[0], row_of(triton_bank, 1)[0]
    assert first[at.LAUNCHES] == second[at.LAUNCHES] == 2
    assert [int(first[at.ORDER]), int(second[at.ORDER])] == [1, 2]
    assert [int(first[at.FIRST_BAD_ORDER]), int(second[at.FIRST_BAD_ORDER])] == [3, 4]


def test_one_tensor_is_one_launch(triton_bank):
    x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    kernels.stat(x, 0)
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        kernels.stat(x, 0)
        torch.cuda.synchronize()
    launched = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(launched) == 1, launched
    assert torch.cuda.memory_allocated() == before


def many(count=120):
    return [torch.randn(48 + 16 * (i % 3), 64, device="cuda", dtype=torch.bfloat16) for i in range(count)]


def jobs_of(tensors, **more):
    jobs = [kernels.Job(x, slot, stream=kernels.stream_of(x), **more) for slot, x in enumerate(tensors)]
    assert all(kernels.gathers(job.x) for job in jobs)
    return jobs


def launched_by(body):
    """Names of what the device ran, while waiting for it was an error."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def test_many_tensors_are_one_launch_without_waiting_or_allocating(triton_bank):
    tensors, tables = many(), kernels.Tables()
    kernels.together(jobs_of(tensors), tables)
    jobs = jobs_of(tensors)
    before = torch.cuda.memory_allocated()
    assert [name for name in launched_by(lambda: kernels.together(jobs, tables)) if "many" in name] == ["_stat_many"]
    assert len(launched_by(lambda: kernels.together(jobs, tables))) == 1
    assert torch.cuda.memory_allocated() == before
    moved = jobs_of([x.clone() for x in tensors])
    assert len(launched_by(lambda: kernels.together(moved, tables))) == 2, "the table's copy, and the kernel"
    again = jobs_of(tensors, restart=True)
    kernels.together(again, tables)
    assert len(launched_by(lambda: kernels.together(again, tables))) == 2, "slots that start anew, and the kernel"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2fnuz])
def test_many_tensors_count_what_they_count_one_by_one(triton_bank, dtype):
    shapes = [(), (7,), (3, 33), (64, 48), (2, 3, 3), (70001,), (16, 3, 3, 3), (300, 257)]
    tensors = []
    for shape in shapes * 2:
        x = torch.randn(shape, dtype=torch.float64)
        x.view(-1)[: min(len(RARE), x.numel())] = torch.tensor(RARE[: x.numel()], dtype=torch.float64)
        tensors.append(x.to(dtype).cuda())
    tensors[-1] = tensors[-1].t()
    for slot in range(len(tensors)):
        kernels.want_block16(slot)
        kernels.want_fingerprint(slot)
    kernels.together(jobs_of(tensors), kernels.Tables())
    together = [row_of(triton_bank, slot) for slot in range(len(tensors))]
    assert int(triton_bank.counter) == triton_bank.launches == len(tensors)
    triton_bank.snapshot(len(tensors))
    for slot, x in enumerate(tensors):
        kernels.stat(x, slot)
    for slot, (ints, floats) in enumerate(together):
        alone, true_floats = row_of(triton_bank, slot)
        bad = ints[at.FIRST_BAD_ORDER] < at.NEVER
        assert bad == (alone[at.FIRST_BAD_ORDER] < at.NEVER)
        ints[[at.ORDER, at.FIRST_BAD_ORDER]] = alone[[at.ORDER, at.FIRST_BAD_ORDER]] = 0  # others come first
        assert torch.equal(ints, alone), (slot, (ints != alone).nonzero().flatten())
        assert torch.equal(floats[:2], true_floats[:2])
        assert torch.allclose(floats, true_floats, rtol=1e-5, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_many_updates_count_what_the_reference_counts(triton_bank, dtype):
    jobs = []
    for slot, shape in enumerate([(3, 130), (64, 32), (17,), (70001,), ()]):
        before = (torch.randn(shape) * 2.0 ** torch.randint(-20, 4, shape)).to(dtype).cuda()
        intended = torch.randn(shape).mul(1e-3).cuda()
        after = (before.double() + intended.double()).to(dtype)
        jobs.append(kernels.Job(after, slot, False, before, intended, kernels.stream_of(after)))
    assert all(kernels.gathers(job.x, job.before, job.intended) for job in jobs)
    tables = kernels.Tables()
    kernels.together(jobs, tables)
    triton_bank.snapshot(len(jobs))
    names = launched_by(lambda: kernels.together(jobs, tables))
    assert names.count("_update_many") == len(names) <= 2  # of aligned rows and of others
    for job in jobs:
        ints, floats = row_of(triton_bank, job.slot)
        truth, true_floats, counter = rows("cuda")
        reference.measure_update(job.before, job.x, job.intended, truth, true_floats, counter)
        for column in (at.ORDER, at.REL + at.REL_BINS, at.FINGERPRINT):  # order, scrap, and what nobody asks for
            truth[column] = ints[column]
        assert torch.equal(ints, truth.cpu()), (ints != truth.cpu()).nonzero().flatten()
        assert torch.allclose(floats, true_floats.cpu(), rtol=1e-5, atol=1e-6)


def test_tensors_of_another_stream_are_waited_for_on_the_device(triton_bank):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x = torch.full((1000,), 3.0, device="cuda")
        job = kernels.Job(x, 0, stream=kernels.stream_of(x))
    kernels.together([job], kernels.Tables())
    assert row_of(triton_bank)[1][at.AMAX] == 3.0


def test_rows_that_another_stream_fills_are_waited_for_on_the_device(triton_bank):
    x = torch.full((1000,), 3.0, device="cuda")
    kernels.stat(x, 0)  # compiles the kernel
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        triton_bank.row(200)
    kernels.stat(x, 130)
    assert row_of(triton_bank, 130)[1][at.AMAX] == 3.0


def test_while_a_graph_is_captured_nothing_waits(triton_bank):
    x = torch.randn(1000, device="cuda")
    kernels.stat(x, 0)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert not kernels.gathers(x)
        kernels.stat(x, 0)


def test_a_capture_creates_no_bank():
    """Filling it would copy from the host, which ends the capture with an error."""
    kernels.forget_all()
    x = torch.randn(1000, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernels.stat(x, 0)
    assert kernels.banks() == {}


def test_measuring_and_taking_a_snapshot_never_wait_for_the_device():
    x = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    bank = kernels.bank(x.device)
    kernels.stat(x, 3)
    bank.snapshot(4).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            kernels.stat(x, 3)
            snapshot = bank.snapshot(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    snapshot.wait()
    assert snapshot.row(3)[0][at.NUMEL] == x.numel()
    kernels.forget_all()
