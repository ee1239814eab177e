"""The CUDA kernels, compiled without a GPU: what their tile loops are made of, as a table.

    python benchmarks/kernels_aot.py > benchmarks/results/kernels-aot.md

Needs Triton, whose wheel carries the assembler and the disassembler. The tile loop is the innermost loop that reads the
tensor and holds no atomic: ordinary values never leave it but to add up what 31 tiles have gathered.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from precdoctor.recording.kernels import triton_batch, triton_kernel, triton_look
from precdoctor.recording.kernels.tiling import LANES, WIDTH, elements_per_lane
from precdoctor.recording.kernels.triton_tile import FORMATS

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
BLOCKS, FINGERPRINT = 6, 8
#: Warp instructions that a multiprocessor issues per clock; of an H200: multiprocessors, clocks per second, copy rate.
_ISSUED, _PROCESSORS, _CLOCK, _COPY = 4, 132, 1.75e9, 4.3e12


class Kernel(NamedTuple):
    """A kernel as it is compiled for one kind of tensors."""

    name: str
    function: Any
    constants: Sequence[Any]
    #: Elements of a tile, and bytes read for each.
    elements: int
    bytes: int


class Loop(NamedTuple):
    """The tile loop of a kernel."""

    registers: int
    stack: int
    shared: int
    instructions: int
    barriers: int
    fences: int
    atomics: int
    local: int


def _bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _stat(function: Any, name: str, dtype: torch.dtype, want: int, *, flat: bool = True) -> Kernel:
    _, *fmt = FORMATS[dtype]
    size = _bytes(dtype)
    constants = [*fmt, size, *triton_kernel.edges(dtype), want, 0, flat, True]
    return Kernel(name, function, constants, LANES * elements_per_lane(dtype), size)


def _update(name: str, dtype: torch.dtype) -> Kernel:
    _, *fmt = FORMATS[dtype]
    size = _bytes(dtype)
    constants = [*fmt, size, *triton_kernel.edges(torch.float32), 4, True]
    return Kernel(name, triton_batch._update_many, constants, LANES * 4, 2 * size + 4)


def _look(name: str, dtype: torch.dtype) -> Kernel:
    _, *fmt = FORMATS[dtype]
    size = _bytes(dtype)
    return Kernel(name, triton_look._look_many, [*fmt, size, True], LANES * elements_per_lane(dtype), size)


def kernels() -> Iterator[Kernel]:
    """Every kind of launch that ordinary training makes."""
    one, many = triton_kernel._stat, triton_batch._stat_many
    yield _stat(one, "BF16, core", torch.bfloat16, 0)
    yield _stat(one, "BF16, core, rows", torch.bfloat16, 0, flat=False)
    yield _stat(one, "BF16, core, fingerprint", torch.bfloat16, FINGERPRINT)
    yield _stat(one, "BF16, blocks", torch.bfloat16, BLOCKS)
    yield _stat(one, "FP32, core", torch.float32, 0)
    yield _stat(one, "FP32, blocks", torch.float32, BLOCKS)
    yield _stat(one, "FP16, core", torch.float16, 0)
    yield _stat(one, "E4M3, core", torch.float8_e4m3fn, 0)
    yield _stat(one, "E5M2, core", torch.float8_e5m2, 0)
    yield _stat(many, "BF16, core, many", torch.bfloat16, FINGERPRINT)
    yield _stat(many, "FP32, core, many", torch.float32, FINGERPRINT)
    yield _update("FP32, updates", torch.float32)
    yield _update("BF16, updates", torch.bfloat16)
    yield _look("FP32, look", torch.float32)
    yield _look("BF16, look", torch.bfloat16)


def compiled(kernel: Kernel, architecture: int) -> Any:
    """By Triton, for ``sm_<architecture>``."""
    parameters = kernel.function.params
    signature = {p.name: "constexpr" if p.is_constexpr else p.annotation_type for p in parameters}
    names = [p.name for p in parameters if p.is_constexpr]
    source = ASTSource(kernel.function, signature, constexprs=dict(zip(names, kernel.constants, strict=True)))
    target = GPUTarget("cuda", architecture, 32)
    options = triton_kernel.BLOCK_OPTIONS if "blocks" in kernel.name else triton_kernel.OPTIONS
    return triton.compile(source, target=target, options=dict(options))


def tile_loop(program: Any) -> Loop:
    """Of a compiled kernel, from its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(program.asm["cubin"])
    try:
        usage = _run("cuobjdump", "-res-usage", file.name)
        lines, loops = _loops(_run("nvdisasm", "-c", file.name))
    finally:
        os.unlink(file.name)  # noqa: PTH108 - of a name
    found = re.search(r"REG:(\d+) STACK:(\d+).*?SHARED:(\d+)", usage)
    assert found is not None, usage

    def count(body: Sequence[str], pattern: str) -> int:
        return sum(bool(re.search(pattern, line)) for line in body)

    bodies = [lines[first : last + 1] for first, last in loops]
    body = min((b for b in bodies if count(b, r"\bLDG") and not count(b, r"\b(ATOM|RED)")), key=len)
    return Loop(
        *map(int, found.groups()), len(body), count(body, r"\bBAR\."), count(body, r"\bMEMBAR"),
        count(body, r"\b(ATOM|RED)"), count(body, r"\b(LDL|STL)"),
    )  # fmt: skip


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout


def _loops(listing: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Instructions in order, and from where to where each loop reaches: a branch back and its target."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label.group(1)] = len(lines)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction.group(1))
    branches = [(i, m.group(1)) for i, line in enumerate(lines) if (m := re.search(r"BRA.*`\((\.L_x_\d+)\)", line))]
    return lines, [(labels[to], i) for i, to in branches if labels.get(to, i) < i]


def per_element(kernel: Kernel, loop: Loop) -> float:
    """Instructions of a thread for each element that it counts."""
    return loop.instructions * 32 * triton_kernel.OPTIONS["num_warps"] / kernel.elements


def main(architectures: Sequence[int] = (80, 90, 100)) -> None:
    """Print the table."""
    print("# CUDA kernels, compiled ahead of time\n")
    print(f"Made by `make aot` with Triton {triton.__version__}; no GPU was used. Blocks are of 32 and {WIDTH}.\n")
    print(
        "Instructions per element are those of the tile loop. The ceiling is what an H200 could reach if issuing them\n"
        "were all it had to do, as a share of its copy rate (4.3 TB/s read and written).\n"
    )
    for architecture in architectures:
        print(f"## sm_{architecture}\n")
        print("| kernel | registers | stack, bytes | shared, bytes | instructions | per element | barriers | fences |"
              " atomics | local memory | ceiling |")  # fmt: skip
        print("|---|" + "--:|" * 10)
        for kernel in kernels():
            loop = tile_loop(compiled(kernel, architecture))
            cost = per_element(kernel, loop)
            rate = _PROCESSORS * _ISSUED * 32 * _CLOCK / cost * kernel.bytes / _COPY
            print(
                f"| {kernel.name} | {loop.registers} | {loop.stack} | {loop.shared} | {loop.instructions} |"
                f" {cost:.1f} | {loop.barriers} | {loop.fences} | {loop.atomics} | {loop.local} |"
                f" {f'{min(rate, 1):.0%}' if architecture == 90 else ''} |"
            )
        print()


if __name__ == "__main__":
    main(tuple(map(int, sys.argv[1:])) or (80, 90, 100))
