"""Go or no-go: what has to hold on a device before its numbers mean anything. Each check runs in a process of its own.

    python -m benchmarks.gpu.checks NAME[,NAME...] --results FILE [--device cpu]

A check returns the facts that it found, or raises: ``AssertionError`` with what is wrong, :class:`Skip` where the
device has nothing to show. Recording is strict in here: an internal error of the recorder is the check's own.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import trainings
from benchmarks.gpu.place import Place, from_command_line
from benchmarks.gpu.runner import SKIPPED
from benchmarks.gpu.trainings import digest, plain_and_recorded, recorded
from precdoctor.recording import kernels
from precdoctor.recording.kernels import reference
from precdoctor.recording.kernels import row_layout as at
from tests.support.kernels import measure_triton

Facts = dict[str, Any]
Check = Callable[[Place], Facts]
CHECKS: dict[str, Check] = {}


class Skip(Exception):  # noqa: N818 - not an error
    """There is nothing to check here; why."""


def check(body: Check) -> Check:
    """Register a check by the name of its function, with ``-`` for ``_``."""
    CHECKS[body.__name__.replace("_", "-")] = body
    return body


# --- kernels ---------------------------------------------------------------------------------------------------------

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp64": torch.float64,
}
_RARE = [float("nan"), float("inf"), -float("inf"), 0.0, 1e-40, 2.0**-149, 3.4e38, 448.0]
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1),
    "strided rows": lambda x: x[::2],
    "odd columns": lambda x: x[:, 1:],
}


def _values(shape: tuple[int, ...], *, seed: int) -> Tensor:
    """FP64, over 60 binades, with whatever is rare in front and a tile of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    x *= torch.randint(-30, 30, shape, generator=generator).double().exp2()
    flat = x.view(-1)
    flat[: len(_RARE)] = torch.tensor(_RARE, dtype=torch.float64)
    flat[flat.numel() // 2 : flat.numel() // 2 + flat.numel() // 8] = 0.0
    return x


def _triton(place: Place) -> Any:
    try:
        from precdoctor.recording.kernels import triton_kernel
    except ImportError as error:
        raise Skip(f"Triton cannot be imported: {error}") from error
    if not place.is_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise Skip("TRITON_INTERPRET is not set")
    return triton_kernel


def _truth(count: int = 1) -> kernels.Bank:
    bank = kernels.Bank(torch.device("cpu"))
    bank.row(count - 1)
    return bank


def _assert_same(here: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], what: str, *, but: list[int]) -> None:
    """Two rows agree: integers in every bit, but for those columns; sums to what the order of adding leaves open."""
    (ints, floats), (true_ints, true_floats) = ([t.cpu().clone() for t in row] for row in (here, truth))
    for scrap in (*but, *(at.block_hist(block) + at.BLOCK_BINS for block in at.BLOCK_SIZES)):
        ints[scrap] = true_ints[scrap] = 0
    wrong = (ints != true_ints).nonzero().flatten().tolist()
    assert not wrong, f"{what}: {len(wrong)} integer columns differ, first {wrong[:8]}"
    assert torch.equal(floats[:2], true_floats[:2]), f"{what}: largest and smallest {floats[:2]}, not {true_floats[:2]}"
    spread = float(true_floats[at.SUM_SQ].abs().nan_to_num(posinf=0.0).sqrt())
    near = torch.allclose(floats, true_floats, rtol=1e-5, atol=1e-5 * spread + 1e-300, equal_nan=True)
    assert near, f"{what}: sums {floats}, not {true_floats}"


def _size(place: Place) -> tuple[int, int]:
    return (2052, 1024) if place.is_gpu else (6, 34)


def _stat_of(dtype: torch.dtype) -> Check:
    def stat(place: Place) -> Facts:
        """`_stat` counts what the reference counts on the CPU: four layouts, core, blocks, and as weights have it."""
        _triton(place)
        compared, x = 0, _values(_size(place), seed=0).to(dtype)
        for name, arrange in _LAYOUTS.items():
            there = arrange(x.to(place.device))
            for blocks in ((), at.BLOCK_SIZES[1:], at.BLOCK_SIZES):
                bank, truth, fingerprint = kernels.Bank(place.device), _truth(), blocks == at.BLOCK_SIZES
                reference.measure(arrange(x), *truth.row(0), truth.counter, blocks)
                measure_triton(there, *bank.row(0), bank.counter, blocks, fingerprint=fingerprint)
                but = [] if fingerprint else [at.FINGERPRINT]
                _assert_same(bank.row(0), truth.row(0), f"{dtype}, {name}, blocks {blocks}", but=but)
                compared += 1
        return {"tensors compared": compared}

    return stat


# One process per dtype: each compiles a dozen kernels, which the numbers find in the cache afterwards.
CHECKS.update({f"stat-{name}": _stat_of(dtype) for name, dtype in _DTYPES.items()})


def _together(place: Place, jobs: list[kernels.Job]) -> kernels.Bank:
    """Measure jobs as a step does; the bank they are in."""
    _triton(place)
    kernels.together(jobs, kernels.Tables())
    failed = kernels.cuda.failure()
    assert failed is None, failed
    return kernels.bank(place.device)


@check
def stat_many(place: Place) -> Facts:
    """`_stat_many`, one launch per kind of tensor, counts what the reference counts on the CPU."""
    shapes = [(16,), (3, 33), (64, 48), (70001,), (16, 3, 3, 3), (300, 257)]
    shapes = shapes if place.is_gpu else [(16,), (3, 33), (2001,)]
    tensors = [_values(shape, seed=i).to(dtype) for i, shape in enumerate(shapes) for dtype in _DTYPES.values()]
    for slot in range(len(tensors)):
        kernels.want_block16(slot)
        kernels.want_fingerprint(slot)
    there = [x.to(place.device) for x in tensors]
    jobs = [kernels.Job(x, slot, stream=kernels.stream_of(x)) for slot, x in enumerate(there)]
    bank, truth = _together(place, jobs), _truth(len(tensors))
    for slot, x in enumerate(tensors):
        reference.measure(x, *truth.row(slot), truth.counter, at.BLOCK_SIZES)
        what = f"{x.dtype}, {tuple(x.shape)}"
        _assert_same(bank.row(slot), truth.row(slot), what, but=[at.ORDER, at.FIRST_BAD_ORDER])
    return {"tensors compared": len(tensors)}


@check
def update_many(place: Place) -> Facts:
    """`_update_many` counts what the reference counts on the CPU: lost updates and relative sizes."""
    shapes = [(16,), (3, 130), (64, 32), (70001,)] if place.is_gpu else [(16,), (3, 130)]
    cases, jobs = [], []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        for shape in shapes:
            before = (torch.randn(shape) * 2.0 ** torch.randint(-20, 4, shape)).to(dtype)
            intended = torch.randn(shape) * 1e-3
            cases.append((before, (before.double() + intended.double()).to(dtype), intended))
    for slot, case in enumerate(cases):
        before, after, intended = (x.to(place.device) for x in case)
        jobs.append(kernels.Job(after, slot, False, before, intended, kernels.stream_of(after)))
    bank, truth = _together(place, jobs), _truth(len(cases))
    for slot, (before, after, intended) in enumerate(cases):
        reference.measure_update(before, after, intended, *truth.row(slot), truth.counter)
        what = f"{before.dtype}, {tuple(before.shape)}"
        but = [at.ORDER, at.FINGERPRINT, at.REL + at.REL_BINS]  # order, what nobody asks for, scrap
        _assert_same(bank.row(slot), truth.row(slot), what, but=but)
    return {"updates compared": len(cases)}


@check
def without_triton(place: Place) -> Facts:
    """torch's operations, which take over without Triton, run on the device and count the same."""
    for dtype in _DTYPES.values():
        x, bank, truth = _values((300, 257), seed=1).to(dtype), kernels.Bank(place.device), _truth()
        reference.measure(x, *truth.row(0), truth.counter, at.BLOCK_SIZES)
        reference.measure(x.to(place.device), *bank.row(0), bank.counter, at.BLOCK_SIZES)
        _assert_same(bank.row(0), truth.row(0), str(dtype), but=[])
    before, intended = torch.randn(64, 32).bfloat16(), torch.randn(64, 32) * 1e-3
    after = (before + intended).bfloat16()
    bank, truth = kernels.Bank(place.device), _truth()
    reference.measure_update(before, after, intended, *truth.row(0), truth.counter)
    on_device = (x.to(place.device) for x in (before, after, intended))
    reference.measure_update(*on_device, *bank.row(0), bank.counter)
    _assert_same(bank.row(0), truth.row(0), "update", but=[at.REL + at.REL_BINS])
    return {"dtypes": len(_DTYPES)}


# --- recording -------------------------------------------------------------------------------------------------------


@check
def channels_last(place: Place) -> Facts:
    """A CNN in channels_last is recorded from end to end."""
    steps = 5
    with recorded(every=1) as run:
        trainings.cnn(place, steps)
    found = run()
    assert list(found.steps()["step"]) == list(range(steps)), found.steps()
    kinds = set(found.tensors(columns=["kind"])["kind"])
    missing = {"output", "grad_output", "weight", "weight_grad", "update"} - kinds
    assert not missing, f"no rows of {sorted(missing)}"
    return {"rows": len(found.tensors(columns=["step"]))}


@check
def vocabulary(place: Place) -> Facts:
    """A GPT with a vocabulary of 50 257: `log(-1)` is led back to op and line, with default options."""
    with recorded() as run:
        trainings.planted(place)
    report = trainings.diagnose(run())
    assert report.findings, "no findings"
    first = report.findings[0]
    where = first.location
    assert ".log." in f".{where.op}.", f"{first.code}, op {where.op}: {first.message}"
    line = where.source.code or "" if where.source else ""
    assert line.endswith("# planted"), f"line {where.source}"
    return {"finding": f"{first.code} at {where.op}", "cause": first.cause, "line": where.source.line}


@check
def graph_capture(place: Place) -> Facts:
    """A whole training step is captured into a CUDA graph while it is recorded, and trains as without."""
    if not place.is_gpu:
        raise Skip("a CPU captures no graphs")
    weights, run = plain_and_recorded(lambda: digest(trainings.captured(place)), every=1)
    assert weights[0] == weights[1], "the weights differ"
    return {"steps in the log": len(run.steps())}


class _Threads(TorchDispatchMode):
    """Which thread runs which op."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((threading.get_ident(), str(func)))
        return func(*args, **(kwargs or {}))


@check
def device_thread(place: Place) -> Facts:
    """A dispatch mode sees the ops that autograd runs in its thread of the device."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(place.device)
    loss = model(torch.randn(8, 32, device=place.device)).square().mean()
    with _Threads() as mode:
        loss.backward()
    products = [thread for thread, name in mode.seen if ".mm." in f".{name}."]
    assert len(products) >= 3, f"products seen: {len(products)} of {mode.seen}"
    return {"ops": len(mode.seen), "in another thread": sum(t != threading.get_ident() for t, _ in mode.seen)}


@check
def fp8_backward(place: Place) -> Facts:
    """Casts to FP8 are seen, with their scale, in the forward and in the backward pass."""
    with recorded(every=1) as run:
        trainings.narrow(place)
    rows = run().tensors(columns=["kind", "name", "dtype", "scale", "saturated", "flushed"])
    rows = rows[rows["kind"] == "fp8_operand"]
    names = set(rows["name"])
    assert {"input", "grad_output"} <= names, f"casts seen: {sorted(names)}"
    assert rows["scale"].notna().all(), "a scale is missing"
    assert (rows["saturated"] == 0).all(), "clipped, although scaled by its amax"
    return {"casts": len(rows)}


@check
def scaled_mm(place: Place) -> Facts:
    """`torch._scaled_mm` is seen as an FP8 product, with the scales of both operands."""
    if place.is_gpu and torch.cuda.get_device_capability(place.device) < (8, 9):
        raise Skip("this GPU has no FP8 products")
    with recorded(every=1) as run:
        trainings.products(place)
    found = run()
    rows = found.tensors(columns=["kind", "name", "scale"])
    rows = rows[rows["kind"] == "fp8_operand"]
    assert {"input", "weight"} <= set(rows["name"]), f"casts seen: {sorted(set(rows['name']))}"
    assert rows["scale"].notna().all(), "a scale is missing"
    seen = found.ranks[0].facts["fp8_products"]
    assert seen, "no FP8 product in rank.json"
    return {"casts": len(rows), "products": len(seen)}


@check
def neutral_bf16(place: Place) -> Facts:
    """BF16 autocast, checkpointing, accumulation, clipping, SDPA, a convolution: the same bits as without recording."""
    return _neutral(place, torch.bfloat16)


@check
def neutral_fp16(place: Place) -> Facts:
    """FP16 autocast, `GradScaler` and fused AdamW: the same bits as without recording."""
    return _neutral(place, torch.float16)


def _neutral(place: Place, dtype: torch.dtype) -> Facts:
    weights, run = plain_and_recorded(lambda: digest(trainings.everything(place, dtype)), every=1)
    assert weights[0] == weights[1], "the weights differ"
    steps = run.steps()
    assert steps["loss"].notna().all(), "a loss is missing"
    return {"steps": len(steps), "rows": len(run.tensors(columns=["step"]))}


@check
def loss_scale_collapse(place: Place) -> Facts:
    """A loss scale that falls at every step is found."""
    with recorded() as run:
        trainings.collapsing(place)
    report = trainings.diagnose(run())
    codes = [finding.code for finding in report.findings]
    assert "PD301" in codes, f"findings: {codes}"
    return {"findings": ", ".join(codes)}


@check
def waits(place: Place) -> Facts:
    """The training's threads wait for the device once per step (twice if sampled), never with ``observe``."""
    if not place.is_gpu:
        raise Skip("nobody waits for a CPU")
    seen = {}
    for policy, every, most in (("observe", 1, 0), ("examine", 1, 2), ("examine", 1 << 20, 1)):
        with recorded(every=every, deep_scan=0, on_nonfinite=policy):
            seen[f"{policy}, every {every}"] = waits = trainings.waits_per_step(place)
        assert max(waits) <= most, f"{policy}, every {every}: waits by step {waits}"
    return {name: max(counts) for name, counts in seen.items()}


@check
def compiled_long(place: Place) -> Facts:
    """A compiled GPT-2 medium is recorded at 8 x 1024; what it compiles is kept for the measurements."""
    return _compiled(place, "8x1024")


@check
def compiled_short(place: Place) -> Facts:
    """A compiled GPT-2 medium is recorded at 1 x 256."""
    return _compiled(place, "1x256")


def _compiled(place: Place, shape: str) -> Facts:
    if not place.is_gpu:
        raise Skip("compiling takes minutes on a CPU")
    from benchmarks.gpu.training import step_of

    step = step_of(place, shape, compiled=True)
    step()
    with recorded(every=1, deep_scan=0) as run:
        for _ in range(2):
            step()
    steps = run().steps()
    assert len(steps) == 2, f"{len(steps)} steps in the log"
    return {"rows": len(run().tensors(columns=["step"]))}


def _run(place: Place, name: str) -> str:
    """Run a check and write down what it found: ``ok``, ``failed`` or ``skipped``."""
    about = (CHECKS[name].__doc__ or "").splitlines()[0]
    try:
        facts = CHECKS[name](place)
    except Skip as why:
        place.add("checks", check=name, about=about, result="skipped", facts={"why": str(why)})
        print(why)
        return "skipped"
    except Exception:  # noqa: BLE001 - it is what a check is for
        traceback.print_exc()
        place.add("checks", check=name, about=about, result="failed", facts={})
        return "failed"
    place.add("checks", check=name, about=about, result="ok", facts=facts)
    return "ok"


def main() -> None:
    place, (names,) = from_command_line("names")
    chosen = list(CHECKS) if names == "all" else names.split(",")
    results = {_run(place, name) for name in chosen}
    sys.exit(1 if "failed" in results else SKIPPED if results == {"skipped"} else 0)


if __name__ == "__main__":
    main()
