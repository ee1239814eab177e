"""Every kernel counts the same: the reference against NumPy, the fast ones against the reference."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precdoctor.numerics import EXP_MAX, EXP_MIN
from precdoctor.recording import kernels
from precdoctor.recording.kernels import blocked, cuda, native_cpu, reference
from precdoctor.recording.kernels import row_layout as at
from precdoctor.recording.kernels.light_launch import KernelFailedError
from precdoctor.recording.kernels.tiling import elements_per_lane, fits, tiling
from tests.support.kernels import measure_native
from tests.support.offenders import check_each

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
RARE = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 2.0**-149, -(2.0**-126), 3.4e38, 2.0**-24, 2.0**-25, 448.0]
FAST = {"blocked": blocked.measure, "native": measure_native}


class Row:
    """A fresh slot."""

    def __init__(self) -> None:
        self.ints, self.floats = (t.clone() for t in kernels.Bank(torch.device("cpu")).row(0))
        self.counter = torch.zeros((), dtype=torch.int64)

    def measured(self, kernel, x, blocks=(16, 32, 128)):
        kernel(x, self.ints, self.floats, self.counter, blocks)
        for block in at.BLOCK_SIZES:  # scrap
            self.ints[at.block_hist(block) + at.BLOCK_BINS] = 0
        return self


def available(name: str) -> bool:
    return name != "native" or native_cpu.library() is not None


@st.composite
def tensors(draw, dtypes=DTYPES):
    shape = draw(st.sampled_from([(), (1,), (7,), (3, 33), (2, 5, 130), (4, 1), (70001,), (2, 3, 3, 3), (300, 257)]))
    seed = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * draw(st.sampled_from([0.0, 1.0, 1e-7, 1e-30, 1e-40, 1e30]))
    if draw(st.booleans()):  # far apart
        x = x * torch.randint(-60, 60, shape, generator=generator).double().exp2()
    x = x.to(draw(st.sampled_from(dtypes)))
    if x.numel() > 2 and draw(st.booleans()):
        flat = x.to(torch.float64).reshape(-1)
        for value in draw(st.lists(st.sampled_from(RARE), min_size=1, max_size=6)):
            flat[draw(st.integers(0, x.numel() - 1))] = value
        x = flat.reshape(shape).to(x.dtype)
    return draw(st.sampled_from(LAYOUTS if x.dim() > 1 else LAYOUTS[:1]))(x)


#: The same numbers, or some of them, in other places in memory.
LAYOUTS = [
    lambda x: x,
    lambda x: x.transpose(0, -1),
    lambda x: x.transpose(0, 1),
    lambda x: x[..., ::3],
    lambda x: x[::2, ..., 1:] if x.shape[-1] > 1 else x,
    lambda x: x[:, :1].expand(x.shape),
    lambda x: x[0].expand(x.shape),
    lambda x: x.unflatten(0, (-1, 1)).movedim(-1, 1),
]


def exact(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float64).contiguous().numpy()


@settings(max_examples=75, deadline=None)
@given(tensors())
def test_the_reference_agrees_with_numpy(x):
    row, values = Row().measured(reference.measure, x), exact(x)
    finite = values[np.isfinite(values)]
    nonzero = np.abs(finite[finite != 0])
    info = torch.finfo(x.dtype)
    counts = row.ints.numpy()
    assert counts[at.NUMEL] == values.size
    assert counts[at.NAN] == np.isnan(values).sum()
    assert counts[at.POS_INF] == (values == np.inf).sum()
    assert counts[at.NEG_INF] == (values == -np.inf).sum()
    assert counts[at.HIST] == (finite == 0).sum()
    assert counts[at.SUBNORMAL] == (nonzero < info.smallest_normal).sum()
    assert counts[at.AT_MAX] == (nonzero == info.max).sum()
    mantissa, exponent = np.frexp(nonzero)
    bins = np.clip(np.where(mantissa == 0.5, exponent - 2, exponent - 1), EXP_MIN, EXP_MAX)
    expected = np.bincount(bins - EXP_MIN, minlength=at.HIST_BINS)
    assert np.array_equal(counts[at.HIST + 1 : at.HIST + at.HIST_WIDTH], expected)
    amax, amin, total, squares = row.floats.tolist()
    assert not finite.size or amax == np.abs(finite).max()
    assert amin == (nonzero.min() if nonzero.size else np.inf)
    assert total == pytest.approx(math.fsum(finite.ravel()), rel=1e-9, abs=1e-9 * float(np.abs(finite).sum()) + 1e-300)
    assert squares == pytest.approx(float((finite**2).sum()), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(tensors(), st.sampled_from(at.BLOCK_SIZES))
def test_block_histograms_agree_with_a_loop(x, block):
    row = Row().measured(reference.measure, x, (block,))
    values = np.abs(exact(x)).reshape(-1, x.shape[-1] if x.dim() else 1)[:400]
    if values.shape[0] < x.numel() // (x.shape[-1] if x.dim() else 1) or values.size > 40_000:
        return
    below, peaks = np.zeros(at.BLOCK_BINS, int), np.zeros(at.HIST_WIDTH, int)
    for line in values:
        for start in range(0, len(line), block):
            part = line[start : start + block]
            part = part[np.isfinite(part) & (part > 0)]
            if part.size == 0:
                peaks[0] += 1
                continue
            keys = reference.exponent_key(torch.from_numpy(part.copy())).numpy()
            peaks[keys.max()] += 1
            for key in keys:
                below[min(keys.max() - key, at.BLOCK_BINS - 1)] += 1
    first = at.block_hist(block)
    assert np.array_equal(row.ints[first : first + at.BLOCK_BINS].numpy(), below)
    first = at.block_amax(block)
    assert np.array_equal(row.ints[first : first + at.HIST_WIDTH].numpy(), peaks)


def assert_agrees(ours, truth, x):
    assert torch.equal(ours.ints, truth.ints), (ours.ints != truth.ints).nonzero().flatten()
    assert ours.floats[at.AMIN] == truth.floats[at.AMIN]
    if bool(x.to(torch.float64).isfinite().any()):
        assert ours.floats[at.AMAX] == truth.floats[at.AMAX]
    spread = math.sqrt(float(truth.floats[at.SUM_SQ]) * max(x.numel(), 1))
    assert float(ours.floats[at.SUM]) == pytest.approx(
        float(truth.floats[at.SUM]), rel=1e-5, abs=1e-6 * spread + 1e-300
    )
    assert float(ours.floats[at.SUM_SQ]) == pytest.approx(float(truth.floats[at.SUM_SQ]), rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(tensors(DTYPES[1:]))
def test_the_blocked_kernel_agrees_with_the_reference(x):
    assert_agrees(Row().measured(blocked.measure, x), Row().measured(reference.measure, x), x)


@pytest.fixture
def compiled():
    """The compiled kernel; whatever variant a test chooses is put back."""
    if not available("native"):
        pytest.skip("no compiled kernel")
    yield native_cpu
    native_cpu.choose_variant(None)


def variants():
    """Those this processor has."""
    return [name for name in native_cpu.VARIANTS if native_cpu.choose_variant(name) == name]


def measured_by(variant, x):
    native_cpu.choose_variant(variant)
    return Row().measured(measure_native, x)


def assert_every_variant_agrees(x):
    truth = Row().measured(reference.measure, x)
    rows = [measured_by(name, x) for name in variants()]
    for row in rows:
        assert_agrees(row, truth, x)
        assert torch.equal(row.floats.view(torch.int64), rows[0].floats.view(torch.int64))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(x=tensors())
def test_every_compiled_variant_agrees_with_the_reference_and_bitwise_with_the_others(compiled, x):
    assert_every_variant_agrees(x)


@pytest.mark.parametrize("dtype", DTYPES[1:6])
def test_lengths_around_those_of_vectors_and_tiles(compiled, dtype):
    def check(length):
        x = torch.randn(length, generator=torch.Generator().manual_seed(length))
        x[::5] = 0.0
        assert_every_variant_agrees(x.to(dtype))

    check_each(check, [1, 15, 16, 17, 63, 64, 65, 127, 2047, 2048, 2049, 4127])


@pytest.mark.parametrize("value", [0.0, -1.5, 2.0**-20, 2.0**60, 1e300])
def test_a_tile_of_one_exponent_overflows_no_counter(compiled, value):
    """2048 equal keys are 32 vectors of 64: a byte that counts eight keys of each would come to 256."""
    dtype = torch.float32 if value < 1e38 else torch.float64
    assert_every_variant_agrees(torch.full((3, 2048), value, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponents_on_both_sides_of_a_window_s_edge(compiled, dtype):
    """As many binades as a window counts, as two count, and one more or less; some with zeros among them."""

    def check(binades):
        exponents = -(torch.arange(40 * 130) % binades).to(dtype)
        x = (1.25 * exponents.exp2()).view(40, 130)
        x[20:, ::3] = 0.0
        x[30:] = x[30:].sort(dim=1).values  # blocks of one exponent, tiles of many
        assert_every_variant_agrees(x)

    check_each(check, [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 100])


@pytest.mark.parametrize("length", [1, 31, 2048, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_compiled_variant_counts_the_same_of_an_update(compiled, dtype, length):
    generator = torch.Generator().manual_seed(length)
    before = torch.randn(length, generator=generator).to(dtype)
    intended = torch.randn(length, generator=generator) * torch.randint(-90, 90, (length,), generator=generator).exp2()
    intended[::4], before[::7] = 0.0, 0.0
    after = (before + intended.clamp(-1, 1)).to(dtype)
    truth = updated("reference", before, after, intended)
    for name in variants():
        native_cpu.choose_variant(name)
        assert torch.equal(updated("native", before, after, intended).ints, truth.ints), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_what_is_looked_at_on_every_step_is_the_same_in_every_variant_and_on_any_number_of_threads(
    compiled, dtype, bad
):
    generator = torch.Generator().manual_seed(3)
    pieces = [torch.randn(n, generator=generator).to(dtype) for n in (0, 1, 15, 16, 2049, 4111, 600_001)]
    pieces[5][17] = bad
    found = set()
    before = torch.get_num_threads()
    try:
        for name in variants():
            native_cpu.choose_variant(name)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found.add(tuple(x.hex() for x in native_cpu.look(pieces)))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1
    assert {math.isfinite(float.fromhex(amax)) for amax, _ in found} == {bad == 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_threads_nor_where_tensors_lie_change_a_bit(compiled, dtype):
    x = torch.randn(700, 1100).to(dtype)
    x[300, 7] = math.nan
    before = torch.get_num_threads()
    try:
        rows = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows += [Row().measured(measure_native, y) for y in (x, x.clone())]
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for row in rows[1:]:
        assert torch.equal(row.ints, rows[0].ints)
        assert torch.equal(row.floats.view(torch.int64), rows[0].floats.view(torch.int64))


FORKED = """
import os, signal, torch
torch.set_num_threads(2)
from precdoctor.recording import kernels
x = torch.randn(1 << 20)
kernels.stat(x, 0)
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that waits for threads it does not have waits for ever
    kernels.stat(x, 0)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_measures_on_one_thread(compiled):
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flushing_denormals_hides_nothing_from_the_compiled_kernel(compiled, dtype):
    x = torch.full((300,), 2.0**-130).to(dtype)
    x[7] = 2.0**-133
    truth = Row().measured(measure_native, x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        row = Row().measured(measure_native, x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(row.ints, truth.ints)
    assert row.ints[at.SUBNORMAL] == 300
    assert torch.equal(row.floats[:2], truth.floats[:2])


def test_the_compiled_kernel_is_there_when_a_compiler_is():
    import shutil
    from pathlib import Path

    installed = Path(native_cpu.__file__).with_name(native_cpu.LIBRARY).is_file()
    assert installed or shutil.which("cc") is None, "built by `pip install`, or by hand with: python hatch_build.py"


@pytest.mark.parametrize("dtype", [*DTYPES[-4:], torch.float16, torch.bfloat16])
def test_every_code_point(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    codes = np.arange(256 if size == 1 else 65536, dtype=np.uint8 if size == 1 else np.uint16)
    x = torch.from_numpy(codes.view(np.int8 if size == 1 else np.int16)).view(dtype)
    truth = Row().measured(reference.measure, x)
    for name, kernel in FAST.items():
        if available(name):
            assert torch.equal(Row().measured(kernel, x).ints, truth.ints), name


@settings(max_examples=40, deadline=None)
@given(st.lists(tensors([torch.float32]), min_size=2, max_size=4), st.randoms())
def test_launches_into_one_slot_merge_in_any_order(parts, random):
    one, other = Row(), Row()
    for x in parts:
        one.measured(reference.measure, x)
    random.shuffle(parts)
    for x in parts:
        other.measured(reference.measure, x)
    ignored = torch.ones(at.INT_WIDTH, dtype=torch.bool)
    ignored[[at.ORDER, at.FIRST_BAD_ORDER]] = False
    assert torch.equal(one.ints[ignored], other.ints[ignored])
    assert torch.equal(one.floats[:2], other.floats[:2])


def test_order_counts_launches_and_keeps_the_first_and_the_first_bad():
    row = Row()
    for x in (torch.ones(3), torch.tensor([math.inf]), torch.tensor([math.nan])):
        row.measured(reference.measure, x)
    assert row.ints[at.ORDER] == 1
    assert row.ints[at.FIRST_BAD_ORDER] == 2
    assert row.ints[at.LAUNCHES] == 3


def test_fingerprints_tell_values_order_shape_and_dtype_apart():
    base = torch.arange(12, dtype=torch.float32)
    swapped = base.clone()
    swapped[[3, 4]] = base[[4, 3]]
    others = [swapped, base.reshape(3, 4), base.to(torch.bfloat16), -base, base.double()]
    prints = [int(Row().measured(reference.measure, x).ints[at.FINGERPRINT]) for x in [base, *others]]
    assert len(set(prints)) == len(prints)
    again = int(Row().measured(reference.measure, base.clone()).ints[at.FINGERPRINT])
    assert again == prints[0]


@pytest.mark.parametrize(("many", "few"), [(1.0, -1.0), (0.0, 1.0), (1.0, 1.0 + 2**-23)], ids=["signs", "mask", "ulp"])
def test_fingerprints_tell_where_two_elements_differ(many, few):
    """All pairs of places: cheaper mixes of bits and index, which would do for random numbers, collide here."""
    rows = torch.full((1024, 1024), many)
    all_equal = int(reference.fingerprint(rows[0], 0))
    rows.fill_diagonal_(few)
    one = np.array([int(reference.fingerprint(row, 0)) - all_equal for row in rows], object) % 2**64
    one = one.astype(np.uint64)
    two = (one[:, None] + one[None, :])[np.triu_indices(len(one), 1)]
    assert len(np.unique(two)) == len(two)


def test_fingerprint_follows_logical_order_whatever_the_strides():
    x = torch.randn(5, 9, 7)
    for kernel in (reference.measure, *(k for n, k in FAST.items() if available(n))):
        rows = [
            Row().measured(kernel, t).ints[at.FINGERPRINT] for t in (x.transpose(0, 2), x.transpose(0, 2).contiguous())
        ]
        assert rows[0] == rows[1]


def test_more_dimensions_than_a_plan_holds_are_measured_all_the_same():
    x = torch.randn([2] * 11).permute(*reversed(range(11)))
    assert not native_cpu.supports(x)
    assert native_cpu.supports(x.contiguous()) == available("native") and native_cpu.library() is not None
    kernels.stat(x, 0)


def test_nothing_larger_than_a_chunk_is_copied():
    huge = torch.ones(1).expand(1 << 40, 4)  # would be 16 TiB
    start, piece = next(reference.chunks(huge, 4096))
    assert start == 0
    assert piece.numel() <= 4096


def updated(kernel, before, after, intended):
    row = Row()
    if kernel == "native":
        assert native_cpu.supports_update(before, after, intended)
        addresses = row.ints.data_ptr(), row.floats.data_ptr(), row.counter.data_ptr()
        native_cpu.update_at(before, after, intended, *addresses)
    else:
        reference.measure_update(before, after, intended, row.ints, row.floats, row.counter)
    row.ints[at.REL + at.REL_BINS] = 0  # scrap
    return row


@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_lost_updates_are_counted_on_bits(kernel):
    if not available(kernel):
        pytest.skip("no compiled kernel")
    before = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0], dtype=torch.bfloat16)
    intended = torch.tensor([1e-4, 0.1, 0.0, 1e-50, math.nan], dtype=torch.float64)
    after = torch.tensor([1.0, 1.1, 1.0, 0.0, 2.0], dtype=torch.bfloat16)
    row = updated(kernel, before, after, intended)
    assert row.ints[at.UNCHANGED] == 2  # the first and the fourth
    assert row.ints[at.HIST] == 4  # the stored difference is zero there
    rel = row.ints[at.REL : at.REL + at.REL_BINS]
    assert int(rel.sum()) == 2  # zero weights have no exponent to compare with
    assert rel[-14 - -1 - at.REL_MIN] == 1  # 1e-4 is in (2^-14, 2^-13], 1.0 closes bin -1


@pytest.mark.parametrize("kernel", ["reference", "native"])
def test_an_update_of_a_1x1_convolution_in_channels_last_is_counted(kernel):
    if not available(kernel):
        pytest.skip("no compiled kernel")
    before = torch.ones(2, 8, 1, 1, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    intended = torch.full((2, 8, 1, 1), 1e-4)
    assert before.is_contiguous() and before.stride(-1) == 8
    assert updated(kernel, before, before.clone(), intended).ints[at.UNCHANGED] == 16


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES[1:]), st.integers(1, 9000), st.sampled_from([1e-9, 1e-4, 1.0]), st.integers(0, 2**31 - 1))
def test_the_compiled_update_agrees_with_the_reference(dtype, size, step, seed):
    if not available("native"):
        return
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(size, generator=generator).to(dtype)
    intended = torch.randn(size, generator=generator) * step
    intended[::7] = 0.0
    intended[::11] = math.inf
    after = (before.float() + intended).to(dtype)
    ours, truth = updated("native", before, after, intended), updated("reference", before, after, intended)
    if not after.to(torch.float64).isfinite().all():  # the payload of a NaN that subtraction makes is the processor's
        ours.ints[at.FINGERPRINT] = truth.ints[at.FINGERPRINT]
    assert torch.equal(ours.ints, truth.ints)
    assert torch.allclose(ours.floats[1:], truth.floats[1:], rtol=1e-5, atol=1e-6)
    assert ours.floats[at.AMAX] == truth.floats[at.AMAX] or not after.float().isfinite().any()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 5000),
    st.sampled_from([1e-30, 1e-8, 1.0, 1e20]),
    st.sampled_from([None, 1e-5, 0.01]),
    st.integers(1, 3000),
    st.integers(0, 2**31 - 1),
)
def test_adam_s_update_is_the_same_made_in_the_kernel(dtype, size, scale, decay, t, seed):
    if not available("native"):
        return
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(size, generator=generator).to(dtype)
    first, second = torch.randn(size, generator=generator) * scale, torch.rand(size, generator=generator) * scale**2
    first[::5], second[::7], second[::13], first[::17] = 0.0, 0.0, math.inf, math.nan
    adam = kernels.Adam(first, second, -1e-3 / (1 - 0.9**t), (1 - 0.999**t) ** 0.5, 1e-8, decay)
    intended = adam.update(before)
    after = (before + intended).to(dtype)
    assert native_cpu.supports_update(before, after, adam)
    for name in variants():
        native_cpu.choose_variant(name)
        ours, truth = Row(), updated("native", before, after, intended)
        native_cpu.update_at(before, after, adam, ours.ints.data_ptr(), ours.floats.data_ptr(), ours.counter.data_ptr())
        ours.ints[at.REL + at.REL_BINS] = 0  # scrap
        assert torch.equal(ours.ints, truth.ints), name
        assert ours.floats.tolist() == truth.floats.tolist(), name
    native_cpu.choose_variant(None)


def test_the_kernel_leaves_to_torch_what_is_not_in_fp32_or_not_known_yet():
    if not available("native"):
        pytest.skip("no compiled kernel")
    x, wide = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.float64)
    assert native_cpu.supports_update(x, x, kernels.Adam(x, x, -0.1, 1.0, 1e-8))
    others = (x, wide), (x, x.bfloat16()), (x, torch.ones(6, 4).t()), (x, torch.ones(1))
    assert not any(native_cpu.supports_update(x, x, kernels.Adam(*moments, -0.1, 1.0, 1e-8)) for moments in others)
    assert not native_cpu.supports_update(x, x, kernels.Adam(x, x, torch.tensor(-0.1), 1.0, 1e-8))
    assert not native_cpu.supports_update(wide, wide, kernels.Adam(x, x, -0.1, 1.0, 1e-8))


def test_memory_is_only_read_past_torch_where_no_mode_of_the_user_would_notice():
    x, seen = torch.randn(8), []

    class Notes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, _types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    assert kernels.reads_memory(x) == native_cpu.supports(x)
    assert not kernels.reads_memory(x.to("meta"))
    with Notes():
        assert not kernels.reads_memory(x)
    with torch.inference_mode():
        assert not kernels.reads_memory(x)
    assert seen == []


def test_the_op_is_invisible_to_modes_of_the_user():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.seen += 1
            return func(*args, **(kwargs or {}))

    x = torch.randn(8)
    with Count(), kernels.apart_from_user_modes():
        kernels.stat(x, 5)
    assert Count.seen == 0
    assert kernels.bank(x.device).row(5)[0][at.NUMEL] == 8
    kernels.forget_all()


@st.composite
def layouts(draw):
    """Any strided tensor: dimensions in any order, some of their elements left out, some of one element."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    x = torch.empty(sizes).permute(draw(st.permutations(range(len(sizes)))))
    return x[tuple(slice(None, None, draw(st.integers(1, 2))) for _ in sizes)]


@given(layouts(), st.integers(0, 15), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(deadline=None)
def test_there_is_a_tiling_of_whatever_fits_and_it_covers_every_element(x, want, dtype):
    strides = None if x.is_contiguous() else x.stride()
    if not fits(x.shape, strides, want):
        assert len(at.walk(x.shape, strides)[1]) > 3
        return
    on = tiling(x.shape, strides, dtype, want)
    assert on.numel == x.numel() == on.columns * (x.numel() // on.columns)
    lanes = 1024 if on.width else 128 * elements_per_lane(dtype)
    assert on.tiles * lanes >= x.numel()
    assert on.padding >= 0 and (on.width or on.tiles * lanes - on.padding == x.numel())


# --- on CUDA ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        getattr(torch, "AcceleratorError", RuntimeError)("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_a_full_memory_and_errors_of_the_training_do_not_turn_the_triton_kernels_off(error, monkeypatch):
    monkeypatch.setattr(cuda, "_failures", [])

    def launch():
        raise error

    with pytest.raises(type(error)):
        cuda._tried(torch.device("cpu"), launch)
    assert cuda._failures == []


def test_one_kernel_that_does_not_compile_is_told_of_and_three_turn_them_off(monkeypatch):
    monkeypatch.setattr(cuda, "_failures", [])
    monkeypatch.setattr(cuda, "_reported", 0)
    errors = [RuntimeError("PassManager::run failed\nand more"), OSError("no compiler"), OSError("no compiler")]
    seen = []

    def launch(error):
        raise error

    for error in (errors[0], KernelFailedError(), *errors[1:]):  # the first kernel is asked for twice
        assert not cuda._tried(torch.device("cpu"), launch, error)
        seen.append((cuda.gave_up(), cuda.untold_failures()))
    some = "measured by torch's operations, which is slow: Triton failed:"
    assert seen == [
        (False, [f"some tensors are {some} RuntimeError: PassManager::run failed"]),
        (False, []),
        (False, [f"some tensors are {some} OSError: no compiler"]),
        (True, [f"tensors are {some} OSError: no compiler"]),
    ]
