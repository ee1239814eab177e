"""The CPU kernel compiled to look for its own mistakes: memory that is not its own, and what C leaves undefined."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from precdoctor.recording.kernels import native_cpu

ROOT = Path(__file__).parents[3]
KERNELS = Path("precdoctor/recording/kernels")
COMPILER = shutil.which("gcc")
CHECKS = "-g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
#: Has the tests of another process use a kernel that lies elsewhere.
PLUGIN = f"""
import os
from pathlib import Path

def pytest_sessionstart(session):
    from precdoctor.recording.kernels import {Path(native_cpu.__file__).stem} as native

    native.__file__ = os.environ["SANITIZED_KERNELS"] + "/native.py"
    native.library.cache_clear()
    assert Path(native.library()._name).parent == Path(os.environ["SANITIZED_KERNELS"])
"""
#: All but tests of the build and of memory in use, which are not the kernel's.
TESTS = "not there_when_a_compiler_is and not larger_than_a_chunk"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None or platform.system() != "Linux", reason="needs GCC and its sanitizers"),
]


def runtime(name):
    """Where the compiler keeps the library that its checks call; a bare name when it has none."""
    asked = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """A kernel with the checks, and the environment for processes that load it."""
    libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("this GCC comes without sanitizers")
    folder = tmp_path_factory.mktemp("sanitized")
    shutil.copytree(ROOT / KERNELS, folder / KERNELS, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "hatch_build.py", folder)
    environment = {**os.environ, "CC": f"{COMPILER} {CHECKS}"}
    subprocess.run([sys.executable, "hatch_build.py"], cwd=folder, env=environment, check=True)
    (folder / "sanitized.py").write_text(PLUGIN)
    more = {"SANITIZED_KERNELS": str(folder / KERNELS), "PYTHONPATH": str(folder), "LD_PRELOAD": " ".join(libraries)}
    return {**os.environ, **more, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def run(environment, *arguments):
    """Run Python with the checks; what went wrong is at the end of stderr."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=1200)


def test_the_tests_of_the_kernel_touch_nothing_else_and_lean_on_nothing_undefined(sanitized):
    # -s: what the checks print must not end in a file of pytest's
    options = ["-q", "-x", "-s", "-n", "0", "-p", "sanitized", "-p", "no:cacheprovider"]
    tested = run(sanitized, "-m", "pytest", *options, "-k", TESTS, "tests/unit/recording/test_kernels.py")
    assert tested.returncode == 0, tested.stdout[-4000:] + tested.stderr[-4000:]
    assert " passed" in tested.stdout


def test_the_checks_are_there(sanitized):
    """A kernel that is told of more elements than a tensor has is stopped."""
    wrong = (
        "import ctypes, os\n"
        "lib = ctypes.CDLL(os.environ['SANITIZED_KERNELS'] + '/_stats.so')\n"
        "lib.precdoctor_choose(0)\n"
        "data, numel = (ctypes.c_int64 * 1)(), (ctypes.c_int64 * 1)(64)\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "data[0] = libc.malloc(4 * 32)\n"
        "ctypes.memset(data[0], 0, 4 * 32)\n"
        "lib.precdoctor_look(data, numel, ctypes.c_int64(1), 0, (ctypes.c_double * 2)(), 1, ctypes.c_int64(1 << 20))\n"
    )
    stopped = run(sanitized, "-c", wrong)
    assert stopped.returncode != 0
    assert "heap-buffer-overflow" in stopped.stderr
