"""What the CUDA kernels compile to, without a GPU: loops that issue little, wait for nobody and spill nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

with pytest.MonkeyPatch.context() as _patch:  # of the modules that are collected together, the first one loads Triton
    if not torch.cuda.is_available():
        _patch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton.backends.nvidia")

CODE = """
import sys
from benchmarks import kernels_aot as aot
wanted = sys.argv[1:]
for kernel in aot.kernels():
    if kernel.name in wanted:
        loop = aot.tile_loop(aot.compiled(kernel, 90))
        print(kernel.name, loop.stack, loop.barriers, loop.fences, loop.atomics, loop.local,
              round(aot.per_element(kernel, loop)), sep="|")
"""
#: Most instructions for each element; an H200 can issue some 16 per byte that it copies.
MOST = {"BF16, core": 40, "FP32, core": 40, "BF16, blocks": 95, "FP32, updates": 100}
MOST |= {"FP32, look": 24, "BF16, look": 16}


def test_a_tile_costs_few_instructions_and_no_fence_and_nothing_is_spilled():
    root = Path(__file__).parents[3]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *MOST], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {name: list(map(int, rest)) for name, *rest in (line.split("|") for line in done.stdout.splitlines())}
    assert rows.keys() == MOST.keys()
    for name, (stack, barriers, fences, atomics, local, cost) in rows.items():
        assert (fences, atomics, local) == (0, 0, 0), name
        assert stack <= 8, name  # Triton 3.8 keeps one number there, outside of the loop
        assert cost <= MOST[name], name
        assert barriers <= (20 if "blocks" in name else 0), name
