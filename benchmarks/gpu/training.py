"""What recording costs a GPT-2 medium: blocks of unsynchronised steps, plain and recorded in turn.

    python -m benchmarks.gpu.training 8x1024 eager|compiled --results FILE [--device cpu]

Every recorded block stands between two plain ones, and its ratio is to their mean. What a step launches comes from
profiled steps behind all blocks, since a process in which the profiler has run launches more slowly from then on; the
plain step's launches are taken off.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import precdoctor
from benchmarks.gpu.place import Place, from_command_line
from benchmarks.gpu.trainings import counted_waits
from benchmarks.models import GPT
from precdoctor.runlog import Run

CORE = ("output", "grad_output", "weight", "weight_grad")
#: Steps recorded in full at the beginning of a run that a budget leads, and some more: its costs are medians of 16.
_SETTLED = 64 + 20
_NEVER = 1 << 20  # a power of two: no step but the first is sampled
#: By name: options, and steps before the measured ones. The first two are a few percent at most, and measured thrice.
RECORDED: dict[str, tuple[dict[str, Any], int]] = {
    "observe, unsampled": ({"every": _NEVER, "deep_scan": 0, "on_nonfinite": "observe"}, 5),
    "examine, unsampled": ({"every": _NEVER, "deep_scan": 0}, 5),
    "all, every step": ({"every": 1, "deep_scan": 0}, 5),
    "core, every step": ({"every": 1, "deep_scan": 0, "kinds": CORE}, 5),
    "default options": ({}, _SETTLED),
    "all and blocks, every step": ({"every": 1, "deep_scan": 0}, 5),
}
_THRICE = ("observe, unsampled", "examine, unsampled")
#: Our kernels by name; what else recording launches is torch's.
_OURS = ("_stat", "_stat_many", "_restart_many", "_update_many", "_look_many")


def step_of(place: Place, shape: str, *, compiled: bool) -> Callable[[], None]:
    """A training step of GPT-2 medium on ``BATCHxLENGTH`` tokens: BF16 autocast, fused AdamW; a tiny one on a CPU."""
    torch.manual_seed(0)
    batch, length = map(int, shape.split("x"))
    layers, width, heads, vocabulary = (24, 1024, 16, 50257) if place.is_gpu else (2, 32, 2, 64)
    batch, length = (batch, length) if place.is_gpu else (2, 16)
    with place.device:  # a hundred times as fast as on the host
        model = GPT(layers, width, heads, length, vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(vocabulary, (batch, length + 1), device=place.device)
    given, wanted = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    run = torch.compile(model) if compiled else model

    def step() -> None:
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(run(given).flatten(0, 1), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- measuring -------------------------------------------------------------------------------------------------------


class Blocks:
    """Runs blocks of one step function on one device.

    Attributes:
        steps: of a block.
    """

    def __init__(self, place: Place, step: Callable[[], None], *, compiled: bool) -> None:
        self._place, self._step, self._compiled = place, step, compiled
        self.steps = 20 if place.is_gpu else 3

    def block(self) -> dict[str, float]:
        """Milliseconds of a step, waits of a step and milliseconds in them, peak memory, compiled graphs so far."""
        gc.collect()
        gc.freeze()  # what reading a run has imported is no part of a training
        self._place.wait()
        if self._place.is_gpu:
            torch.cuda.reset_peak_memory_stats(self._place.device)
        with counted_waits() as waits:
            began = time.perf_counter()
            for _ in range(self.steps):
                self._step()
            self._place.wait()
            took = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated(self._place.device) / 2**20 if self._place.is_gpu else 0.0
        return {
            "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"] if self._compiled else None,
            "ms": took / self.steps * 1e3,
            "waits": waits[0] / self.steps,
            "wait_ms": waits[1] / self.steps / 1e6,
            "peak_mib": peak,
        }

    def warm_up(self, steps: int) -> None:
        """Steps that nobody measures."""
        for _ in range(steps):
            self._step()

    def profiled(self) -> dict[str, float]:
        """Launches of one step, device milliseconds of all of them; of our kernels alone. On a CPU: torch's ops."""
        kinds, autograd = torch.profiler.ProfilerActivity, torch.autograd.DeviceType
        on_device = autograd.CUDA if self._place.is_gpu else autograd.CPU
        self._place.wait()
        with torch.profiler.profile(activities=[kinds.CUDA if self._place.is_gpu else kinds.CPU]) as profile:
            self._step()
            self._place.wait()
        events = [e for e in profile.events() if e.device_type == on_device]
        ours = [e for e in events if e.name in _OURS]
        return {
            "launches": len(events),
            "device_ms": sum(e.time_range.elapsed_us() for e in events) / 1e3,
            "our_launches": len(ours),
            "our_device_ms": sum(e.time_range.elapsed_us() for e in ours) / 1e3,
        }


def said_by(run: Run, first: int, steps: int) -> dict[str, Any]:
    """What the recorder says of steps ``first .. first + steps - 1`` (medians, N, overhead) and of the whole run."""
    every = run.steps()
    mine = every[(every["step"] >= first) & (every["step"] < first + steps)]
    events = run.events()
    changes = [json.loads(data) for data in events[events["event"] == "sampling"]["data"]]
    errors = [json.loads(data).get("message") for data in events[events["event"] == "error"]["data"]]
    times = {
        f"{column.removesuffix('_ns')}_ms": round(float(mine[column].median()) / 1e6, 3)
        for column in ("recorder_ns", "wait_ns", "device_ns", "step_ns")
        if column in mine and mine[column].notna().any()
    }
    return {
        **times,
        "sampled": int(mine["sampled"].sum()),
        "period": changes[-1]["to"] if changes else run.info.get("options", {}).get("every") or 1,
        "overhead": overhead(mine),
        "overhead_of_run": overhead(every),
        "errors": errors[:3],
    }


def overhead(steps: Any) -> float | None:
    """The recorder's time by the steps' time, as reports state it."""
    known = steps[["recorder_ns", "step_ns"]].dropna()
    total = float(known["step_ns"].sum())
    return float(known["recorder_ns"].sum()) / total if total else None


def recorded(place: Place, blocks: Blocks, name: str, folder: str) -> dict[str, Any]:
    """One block under one set of options."""
    options, before = RECORDED[name]
    before = before if place.is_gpu or not options else 3
    with always_with_blocks() if "blocks" in name else contextlib.nullcontext():
        with precdoctor.record(folder, **options) as recording:
            blocks.warm_up(before)
            found: dict[str, Any] = blocks.block()
        return {**found, "said": said_by(recording.open(), before, blocks.steps)}


def profiled(blocks: Blocks, name: str, folder: str) -> dict[str, Any]:
    """What one step launches under one set of options."""
    options, _ = RECORDED[name]
    which = always_with_blocks() if "blocks" in name else contextlib.nullcontext()
    with which, precdoctor.record(folder, **options):
        blocks.warm_up(3)  # steps 0, 1 and 2 have block histograms
        return blocks.profiled()


@contextlib.contextmanager
def always_with_blocks() -> Any:
    """Every sampled step has block histograms; by itself the recorder takes them every 64th step."""
    from precdoctor.recording.recorder.sampling import Sampler

    own = Sampler.wants_blocks
    Sampler.wants_blocks = lambda *_: True
    try:
        yield
    finally:
        Sampler.wants_blocks = own


def measure(place: Place, shape: str, mode: str) -> None:
    """Plain and recorded blocks in turn, as many as there is time for."""
    compiled = mode == "compiled" and place.is_gpu
    blocks = Blocks(place, step_of(place, shape, compiled=compiled), compiled=compiled)
    of = {"shape": shape, "mode": mode}
    blocks.warm_up(5)
    with tempfile.TemporaryDirectory() as folder, precdoctor.record(f"{folder}/run", every=1, deep_scan=0):
        blocks.warm_up(4)  # compiles the kernels, which would be taken for the cost of the first setting
    blocks.warm_up(5)
    first = blocks.block()
    place.add("training", **of, name="off, first", **first)
    plain, longest = blocks.block(), 0.0
    for name in (*(_THRICE * 3 if place.is_gpu else _THRICE), *(n for n in RECORDED if n not in _THRICE)):
        if place.left() < 1.5 * longest + 15.0:
            break
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = recorded(place, blocks, name, f"{folder}/run")
        after = blocks.block()
        ratio = found["ms"] / statistics.mean((plain["ms"], after["ms"]))
        place.add("training", **of, name=name, ratio=ratio, off_ms=after["ms"], **found)
        plain = after
        longest = max(longest, time.monotonic() - began)
    place.add("training", **of, name="off, after all", **blocks.block())
    place.add("launches", **of, name="off", **blocks.profiled())
    for name in [name for name, (options, _) in RECORDED.items() if options]:
        with tempfile.TemporaryDirectory() as folder:
            place.add("launches", **of, name=name, **profiled(blocks, name, f"{folder}/run"))


def main() -> None:
    place, (shape, mode) = from_command_line("shape", "mode")
    measure(place, shape, mode)


if __name__ == "__main__":
    main()
