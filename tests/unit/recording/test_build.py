"""The build of the CPU kernel, with compilers that do not know every instruction."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = Path("precdoctor/recording/kernels")
LIBRARY = KERNELS / "_stats.so"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def build_without(option, folder):
    """Build the kernel below ``folder`` with a compiler that refuses one option; the exit status and what was said."""
    shutil.copytree(ROOT / KERNELS, folder / KERNELS, ignore=shutil.ignore_patterns(LIBRARY.name, "__pycache__"))
    shutil.copy(ROOT / "hatch_build.py", folder)
    compiler = folder / "old-cc"
    refuse = f'if [ "$a" = {option} ]; then echo "unknown option $a" >&2; exit 1; fi'
    # not optimised: the test waits for it
    compiler.write_text(f'#!/bin/sh\nfor a; do {refuse}; done\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    command, environment = [sys.executable, "hatch_build.py"], {**os.environ, "CC": str(compiler)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(("option", "best"), [("-mgfni", 2), ("-mavx2", 1)])
def test_an_old_compiler_leaves_out_what_it_does_not_know(tmp_path, option, best):
    status, said = build_without(option, tmp_path)
    assert status == 0
    assert 1 <= ctypes.CDLL(str(tmp_path / LIBRARY)).precdoctor_choose(0) <= best
    if "unknown option" in said:  # on other processors than x86 nobody asks for it
        assert "variant of the C kernel was not built" in said


def test_a_compiler_that_fails_leaves_the_torch_kernel_and_nothing_half_built(tmp_path):
    status, said = build_without("-c", tmp_path)
    assert status == 1
    assert "the torch kernel will be used" in said
    assert not [p.name for p in (tmp_path / KERNELS).iterdir() if p.suffix in {".so", ".tmp"}]
