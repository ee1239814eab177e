"""Build hook: compiles the CPU kernel into the package. Without a C compiler the package works all the same, slower."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
elif __name__ == "__main__":  # by hand, where hatchling need not be installed
    BuildHookInterface = object
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = Path("precdoctor/recording/kernels")
_LIBRARY = _FOLDER / "_stats.so"
#: No fused multiply-add anywhere: every variant gives the same bits. Nothing traps, which lets loops be vectorised.
_FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
_AVX2 = ["-mavx2", "-mf16c", "-mbmi", "-mbmi2"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
_AVX512 += ["-mavx512vbmi", "-mavx512bitalg", "-mgfni"]
#: What ``variant.c`` is compiled for; ``stats.c`` chooses at run time.
_VARIANTS = {"baseline": [], "avx2": _AVX2, "avx512": _AVX512}


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
    # A new file, renamed into place: a process that has the old one loaded keeps it.
    temporary = root / _LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    try:
        with tempfile.TemporaryDirectory() as folder:
            _link([*compiler.split(), *_FLAGS], root / _FOLDER, Path(folder), temporary)
        temporary.replace(root / _LIBRARY)
    except (OSError, subprocess.CalledProcessError) as error:
        temporary.unlink(missing_ok=True)
        print(f"precdoctor: the C kernel was not built ({error}); the torch kernel will be used", file=sys.stderr)
        return False
    return True


def _link(compile_with: list[str], sources: Path, folder: Path, library: Path) -> None:
    """Compile each variant and the entry points below ``folder`` and link them as ``library``.

    A compiler too old for the instructions of a variant (GCC 8 is the first with all of them) costs that variant only.
    """
    objects = []

    def compiled(name: str, *arguments: str) -> None:
        objects.append(str(folder / f"{name}.o"))
        subprocess.run([*compile_with, "-c", *arguments, "-o", objects[-1]], check=True)

    levels = 0
    for name, flags in _VARIANTS.items() if platform.machine() in {"x86_64", "AMD64"} else [("baseline", [])]:
        try:
            compiled(name, str(sources / "variant.c"), f"-DVARIANT=precdoctor_tiles_{name}", *flags)
        except subprocess.CalledProcessError:
            if not flags:
                raise
            objects.pop()
            print(f"precdoctor: the {name} variant of the C kernel was not built; slower ones were", file=sys.stderr)
            break
        levels += 1
    compiled("stats", str(sources / "stats.c"), f"-DPRECDOCTOR_LEVELS={levels}")
    subprocess.run([*compile_with, "-shared", "-o", str(library), *objects, "-lm"], check=True)


if __name__ == "__main__":  # from a source tree: python hatch_build.py
    sys.exit(0 if compile_kernel(Path(__file__).resolve().parent) else 1)
