"""Build hook: compiles the CPU kernel into the package. Without a C compiler the package works all the same, slower."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SOURCE = Path("precdoctor/recording/kernels/stats.c")
_LIBRARY = Path("precdoctor/recording/kernels/_stats.so")


class KernelBuildHook(BuildHookInterface):
    """Runs for wheels, editable ones included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 -- hatchling's
        """Compile, add the library to the wheel and mark the wheel as one for this platform."""
        root = Path(self.root)
        if self.target_name != "wheel" or not compile_kernel(root):
            return
        build_data["artifacts"].append(str(_LIBRARY))
        build_data["pure_python"] = False
        # No Python ABI: the library is called through ctypes.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compile_kernel(root: Path) -> bool:
    """Compile the kernel below ``root``; says so and returns false when that is not possible."""
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None or os.name != "posix":
        print("precdoctor: no C compiler; the torch kernel will be used", file=sys.stderr)
        return False
    command = [*compiler.split(), "-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno"]
    # A new file, renamed into place: a process that has the old one loaded keeps it.
    temporary = root / _LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    try:
        subprocess.run([*command, "-o", str(temporary), str(root / _SOURCE), "-lm"], check=True)
        temporary.replace(root / _LIBRARY)
    except (OSError, subprocess.CalledProcessError) as error:
        temporary.unlink(missing_ok=True)
        print(f"precdoctor: the C kernel was not built ({error}); the torch kernel will be used", file=sys.stderr)
        return False
    return True


if __name__ == "__main__":  # from a source tree: python hatch_build.py
    sys.exit(0 if compile_kernel(Path(__file__).resolve().parent) else 1)
