"""The machine: versions, tools, the device, and the first kernel compiled on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.place import Place, from_command_line
from precdoctor.recording import kernels
from precdoctor.recording.kernels import cuda, native_cpu

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("triton", "numpy", "pandas", "pyarrow", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "torchao")
_NVIDIA_SMI = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"


def output_of(*command: str, lines: int = 1) -> str:
    """The first lines a tool prints; why not, where it does not run."""
    if shutil.which(command[0]) is None:
        return "not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    return "; ".join((done.stdout or done.stderr).strip().splitlines()[:lines])


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def device_facts(place: Place) -> dict[str, object]:
    """What torch sees of the device."""
    if not place.is_gpu:
        return {"device": f"CPU in the GPU's place ({platform.machine()})"}
    properties = torch.cuda.get_device_properties(place.device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "device memory, MiB": properties.total_memory >> 20,
        "L2, MiB": properties.L2_cache_size >> 20,
        "nvidia-smi": output_of("nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader"),
    }


def kernel_of(device: torch.device) -> str:
    """The kernel that measures tensors of a device: ``C (avx2)``, ``Triton``, ``torch operations``."""
    if device.type == "cpu" and native_cpu.library() is not None:
        return f"C ({native_cpu.variant()})"
    if device.type == "cuda":
        return "Triton" if cuda.failure() is None else f"torch operations ({cuda.failure()})"
    return "torch operations"


def build_kernel() -> str:
    """Compile the CPU kernel into the tree where that was not done yet."""
    if native_cpu.library() is None and shutil.which("gcc"):
        subprocess.run([sys.executable, str(ROOT / "hatch_build.py")], cwd=ROOT, timeout=60, check=False)
        native_cpu.library.cache_clear()
    return kernel_of(torch.device("cpu"))


def first_launch(place: Place) -> dict[str, object]:
    """Seconds of the first launch on the device, which compiles; of the second one."""
    x, seconds = torch.ones(1 << 16, device=place.device, dtype=torch.bfloat16), []
    for _ in range(2):
        place.wait()
        began = time.perf_counter()
        kernels.stat(x, 0)
        place.wait()
        seconds.append(time.perf_counter() - began)
    return {
        "kernel": kernel_of(place.device),
        "first launch, s": round(seconds[0], 3),
        "second launch, s": round(seconds[1], 6),
    }


def main() -> None:
    place, _ = from_command_line()
    place.add(
        "env", facts={"Python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
    )
    place.add("env", facts={name: version(name) for name in PACKAGES})
    place.add("env", facts={"CPUs": os.cpu_count(), "commit": output_of("git", "rev-parse", "--short", "HEAD")})
    place.add("env", facts={tool: output_of(tool, "--version") for tool in ("gcc", "nvcc")})
    place.add("env", facts={"ncu": output_of("ncu", "--version", lines=9).split("; ")[-1]})
    place.add("env", facts={"TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", "not set")})
    place.add("env", facts={"CPU kernel": build_kernel()})
    place.add("env", facts=device_facts(place))
    launched = first_launch(place)
    place.add("env", facts=launched)
    if place.is_gpu and launched["kernel"] != "Triton":
        raise SystemExit(f"statistics on the GPU are taken by {launched['kernel']}")


if __name__ == "__main__":
    main()
