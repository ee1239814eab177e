"""What the kernels cost by themselves: bytes per second beside a copy, and what a launch costs whatever it reads.

python -m benchmarks.gpu.bandwidth tensors|launches|profile --results FILE [--device cpu]
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.gpu.place import Place, from_command_line
from precdoctor.recording import kernels
from precdoctor.recording.kernels.device_look import DeviceLook

DTYPES = {"BF16": torch.bfloat16, "FP32": torch.float32, "E4M3": torch.float8_e4m3fn}
SETS = {"core": False, "blocks": True}
#: Tensors of one cell together have this many bytes at least: none is still in the L2 cache when it comes again.
_BEYOND_CACHE = 256 << 20
_REPEATS = 7

Body = Callable[[], object]


def content(name: str, numel: int, place: Place) -> Tensor:
    """FP32 values of that kind; ``strided rows`` are every second row of 1024."""
    x = torch.randn(2 * numel if name == "strided rows" else numel, device=place.device)
    if name == "40 binades":
        x = torch.exp2(torch.rand_like(x) * 40 - 30)
    if name == "90 % zeros":
        x *= torch.rand_like(x) >= 0.9
    return x


def tensors_of(name: str, dtype: torch.dtype, size: int, place: Place) -> list[Tensor]:
    """Enough tensors of ``size`` bytes each to come one after the other without a cache in between."""
    numel = size // dtype.itemsize
    count = max(1, _BEYOND_CACHE // size) if place.is_gpu else 2
    first = content(name, numel, place).to(dtype)
    tensors = [first, *(first.view(torch.uint8).clone().view(dtype) for _ in range(count - 1))]
    if name == "strided rows":
        return [x.view(-1, 2, 1024)[:, 0] for x in tensors]
    return [x.view(-1, 1024) for x in tensors]


CONTENTS = ("randn", "40 binades", "90 % zeros", "strided rows")


def seconds(bodies: Sequence[Body], place: Place) -> float:
    """Median time of one body, of several that take turns; on a GPU the device's, by events around all of them."""
    for body in bodies:
        body()
    times = []
    for _ in range(_REPEATS):
        if place.is_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for body in bodies:
                body()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(bodies))
            continue
        began = time.perf_counter()
        for body in bodies:
            body()
        times.append((time.perf_counter() - began) / len(bodies))
    return statistics.median(times)


def copy_rate(size: int, place: Place) -> float:
    """Bytes per second, read and written, of a plain copy."""
    tensors = tensors_of("randn", torch.bfloat16, size, place)
    to = [torch.empty_like(x) for x in tensors]
    return 2 * size / seconds([lambda x=x, y=y: y.copy_(x) for x, y in zip(tensors, to, strict=True)], place)


def tensors(place: Place) -> None:
    """The kernel of one tensor, by dtype, statistics, content and size."""
    sizes = (64 << 20, 512 << 20) if place.is_gpu else (1 << 18, 1 << 19)
    copies = {size: copy_rate(size, place) for size in sizes}
    for size, rate in copies.items():
        place.add("numbers", table="copy", bytes=size, rate=rate)
    kernels.bank(place.device)
    for size, (words, blocks), (dtype, of), name in itertools.product(sizes, SETS.items(), DTYPES.items(), CONTENTS):
        kernels.want_blocks(wanted=blocks)
        bodies = [lambda x=x: kernels.stat(x, 0) for x in tensors_of(name, of, size, place)]
        rate = size / seconds(bodies, place)
        place.add(
            "numbers", table="stat", bytes=size, dtype=dtype, set=words, content=name, rate=rate,
            share=rate / copies[size],
        )  # fmt: skip
        kernels.bank(place.device).snapshot(1).wait()
    kernels.want_blocks(wanted=True)


# --- launches --------------------------------------------------------------------------------------------------------


def in_a_graph(body: Body, count: int) -> float:
    """Device seconds of one launch, of a CUDA graph that holds ``count``."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            body()
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(times)


def host_seconds(body: Body, count: int, place: Place) -> float:
    """Of a call, without waiting for what it launches."""
    times = []
    for _ in range(_REPEATS):
        place.wait()
        began = time.perf_counter()
        for _ in range(count):
            body()
        times.append((time.perf_counter() - began) / count)
    place.wait()
    return statistics.median(times)


def launches(place: Place) -> None:
    """Fixed costs: one small tensor; 200 of them one by one and together; a GPT-2 medium's parameters and updates."""
    kernels.bank(place.device)
    for words, blocks in SETS.items():
        kernels.want_blocks(wanted=blocks)
        for numel in (64, 1 << 16):
            x = torch.randn(numel, device=place.device)
            body = functools.partial(kernels.stat, x, 0)
            host = host_seconds(body, 100 if place.is_gpu else 10, place)
            device = in_a_graph(body, 100) if place.is_gpu else None
            name = f"one of {numel} FP32 elements, {words}"
            place.add("numbers", table="launch", what=name, host=host, device=device, bytes=4 * numel)
    kernels.want_blocks(wanted=False)
    small = [torch.randn(256, 256, device=place.device) for _ in range(200 if place.is_gpu else 8)]
    _many(place, f"{len(small)} of 256 x 256 FP32", small)
    if place.is_gpu:
        shapes = [(50257, 1024), *[(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] * 24]
        weights = [torch.randn(shape, device=place.device) * 0.02 for shape in shapes]
        _many(place, "a GPT-2 medium's matrices, FP32", weights)
        _many(place, "the same in BF16", [x.bfloat16() for x in weights])
    kernels.want_blocks(wanted=True)


def _many(place: Place, name: str, tensors: list[Tensor]) -> None:
    size = sum(x.numel() * x.element_size() for x in tensors)
    stream = kernels.stream_of(tensors[0])
    jobs = [kernels.Job(x, slot, stream=stream) for slot, x in enumerate(tensors)]
    tables = kernels.Tables()
    bodies: dict[str, tuple[Body, int]] = {
        "one by one": (lambda: [kernels.stat(x, slot) for slot, x in enumerate(tensors)], size)
    }
    if place.is_gpu:  # the CPU's kernel has nothing to gain from that
        changed = [(x + 1e-4 * x, torch.full_like(x, 1e-4, dtype=torch.float32)) for x in tensors]
        updates = [
            kernels.Job(y, slot, False, x, d, stream)
            for slot, (x, (y, d)) in enumerate(zip(tensors, changed, strict=True))
        ]
        of_updates = kernels.Tables()
        read = 2 * size + 4 * sum(x.numel() for x in tensors)
        bodies["together"] = lambda: kernels.together(jobs, tables), size
        look, where = DeviceLook(tensors), [x.data_ptr() for x in tensors]
        bodies["looked at"] = lambda: look.look(where, stream), size
        bodies["updates together"] = lambda: kernels.together(updates, of_updates), read
    for how, (body, read) in bodies.items():
        device = seconds([body], place)
        host = host_seconds(body, 3, place)
        place.add("numbers", table="launch", what=f"{name}, {how}", host=host, device=device, bytes=read)


def profile(place: Place) -> None:
    """Four launches on 512 MiB, for a profiler to look at: BF16 core twice, with blocks twice."""
    x = torch.randn(256 << 20 if place.is_gpu else 1 << 18, device=place.device).bfloat16().view(-1, 1024)
    for blocks in (False, True):
        kernels.want_blocks(wanted=blocks)
        for _ in range(2):
            kernels.stat(x, 0)
    place.wait()


def main() -> None:
    place, (what,) = from_command_line("what")
    {"tensors": tensors, "launches": launches, "profile": profile}[what](place)


if __name__ == "__main__":
    main()
