"""What the CPU statistics kernel costs: time per element by number format and statistic set, and per call.

    python benchmarks/kernels.py [--elements 8388608] [--repeat 15] [--variant avx2]

One thread, CPU time of that thread, the best of several interleaved repetitions. Other programs on the machine still
share its caches, memory and cores: the load average is printed, and only ratios within one table compare. "Read" is a
plain sum over the same bytes. Prints Markdown; put it under benchmarks/results/.
"""

import argparse
import os
import platform
import time
from pathlib import Path

import torch

from precdoctor.recording import kernels
from precdoctor.recording.kernels import blocked, native_cpu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64]
SETS = {"no blocks": (), "blocks of 32, 128": (32, 128), "16, 32, 128": (16, 32, 128)}


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def data(elements):
    """Gaussian rows of 1024 with log-normal scales, 2 % zeros."""
    generator = torch.Generator().manual_seed(0)
    rows = elements // 1024
    x = torch.randn(rows, 1024, generator=generator) * torch.randn(rows, 1, generator=generator).exp()
    return x.masked_fill_(torch.rand(x.shape, generator=generator) < 0.02, 0.0)


def contents(elements):
    """FP32 content that is unlike the usual."""
    x = data(elements)
    return {
        "usual": x,
        "half zeros (ReLU)": x.relu(),
        "exponents uniform over 120 binades": x * torch.randint(-60, 60, x.shape).float().exp2(),
        "one NaN in 4096": x.clone().view(-1, 4096).index_fill_(1, torch.tensor([7]), float("nan")).view_as(x),
        "all tiny (1e-30)": x * 1e-30,
        "transposed": x.t(),
        "every second column": torch.cat([x, x], dim=1)[:, ::2],
        "heads moved (B, H, T, D)": x.view(8, -1, 16, 64).transpose(1, 2),
    }


def measure(x, ints, floats, counter, blocks):
    native_cpu.measure_at(x, ints.data_ptr(), floats.data_ptr(), counter.data_ptr(), native_cpu.wanted(blocks))


def best_of(bodies, repeat):
    """Least thread CPU time of each body, ns; they take turns."""
    best = dict.fromkeys(bodies, float("inf"))
    for _ in range(repeat):
        for name, body in bodies.items():
            began = time.thread_time_ns()
            body()
            best[name] = min(best[name], time.thread_time_ns() - began)
    return best


def slot():
    ints, floats = kernels.Bank(torch.device("cpu")).row(0)
    return ints, floats, torch.zeros((), dtype=torch.int64)


def by_dtype(arguments):
    x, into = data(arguments.elements), slot()
    bodies = {}
    for dtype in DTYPES:
        y = x.to(dtype)
        as_words = y.view(torch.float32)
        bodies[dtype, "read"] = lambda w=as_words: w.sum()
        for name, blocks in SETS.items():
            bodies[dtype, name] = lambda y=y, b=blocks: measure(y, *into, b)
    best = best_of(bodies, arguments.repeat)
    print(
        "| dtype | " + " | ".join(f"{name}, ns/element" for name in SETS) + " | no blocks, GB/s | read, GB/s | ratio |"
    )
    print("|---" * (len(SETS) + 4) + "|")
    for dtype in DTYPES:
        times = [best[dtype, name] / arguments.elements for name in SETS]
        size, read = dtype.itemsize, best[dtype, "read"] / arguments.elements
        cells = [f"{t:.2f}" for t in times] + [f"{size / times[0]:.1f}", f"{size / read:.1f}", f"{times[0] / read:.1f}"]
        print(f"| {str(dtype).removeprefix('torch.')} | " + " | ".join(cells) + " |")


def by_content(arguments):
    tensors, into = contents(arguments.elements), slot()
    bodies = {
        (name, blocks): lambda y=y, b=blocks: measure(y, *into, b)
        for name, y in tensors.items()
        for blocks in ((), (32, 128))
    }
    best = best_of(bodies, max(3, arguments.repeat // 3))
    print("\n| FP32 content | no blocks, ns/element | blocks of 32, 128 |\n|---|---|---|")
    for name in tensors:
        cells = [f"{best[name, blocks] / arguments.elements:.2f}" for blocks in ((), (32, 128))]
        print(f"| {name} | " + " | ".join(cells) + " |")


def by_kernel(arguments):
    x, into = data(1 << 20), slot()
    names = {"torch, blocked": blocked.measure, "reference": reference.measure}
    bodies = {name: lambda k=kernel: k(x, *into, (32, 128)) for name, kernel in names.items()}
    for variant in native_cpu.VARIANTS:
        if native_cpu.choose_variant(variant) == variant:
            bodies[f"C, {variant}"] = lambda v=variant: (
                native_cpu.choose_variant(v),
                measure(x, *into, (32, 128)),
            )
    best = best_of(bodies, arguments.repeat)
    native_cpu.choose_variant(arguments.variant)
    print("\n| kernel, FP32, 1 Mi elements, blocks of 32, 128 | ns/element |\n|---|---|")
    for name, spent in sorted(best.items(), key=lambda item: item[1]):
        print(f"| {name} | {spent / x.numel():.2f} |")


def per_call(arguments):
    print("\n| elements | as hooks call it, µs | the library alone, µs |\n|---|---|---|")
    for elements in (16, 256, 4096, 65536):
        x, calls, into = torch.randn(elements), max(20, 200_000 // (elements + 100)), slot()

        def as_hooks(x=x, calls=calls):
            for _ in range(calls):
                with kernels.apart_from_user_modes():
                    kernels.stat(x, 0)

        def alone(x=x, calls=calls, into=into):
            for _ in range(calls):
                measure(x, *into, (32, 128))

        best = best_of({"hooks": as_hooks, "alone": alone}, arguments.repeat)
        print(f"| {elements} | {best['hooks'] / calls / 1e3:.1f} | {best['alone'] / calls / 1e3:.1f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--variant", choices=native_cpu.VARIANTS)
    arguments = parser.parse_args()
    if native_cpu.library() is None:
        raise SystemExit("there is no compiled kernel here; make one with: python hatch_build.py")
    torch.set_num_threads(1)
    variant = native_cpu.choose_variant(arguments.variant)
    print(f"{time.strftime('%Y-%m-%d')}  {processor()}  torch {torch.__version__}  kernel: C ({variant}), one thread")
    load = os.getloadavg()[0]
    print(
        f"{arguments.elements} elements, best of {arguments.repeat}; every set has the fingerprint; load {load:.1f}\n"
    )
    by_dtype(arguments)
    by_content(arguments)
    by_kernel(arguments)
    per_call(arguments)


if __name__ == "__main__":
    main()
