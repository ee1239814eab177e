"""The examples of the integrations page run as they stand there, and record what they say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

import precdoctor
from tests.support.blocks import blocks
from tests.support.processes import PATIENCE, ROOT, environment

EXAMPLES = {b.under: b.code for b in blocks(ROOT / "docs" / "integrations.md") if b.language == "python"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
#: Example, package it needs, optimizer steps, modules it must have recorded.
CASES = [
    ("A block", "torch", 5, {"0", "2"}),
    ("accelerate", "accelerate", 5, {"0", "2"}),
    ("transformers", "transformers", 4, {"transformer.h.0.attn.c_attn", "lm_head"}),
    ("Lightning", "lightning", 4, {"net.0", "net.2"}),
]


def test_every_example_is_a_case():
    assert set(EXAMPLES) == {name for name, *_ in CASES}


#: All in one process, one after the other: half of the time of such a script is imports.
DRIVER = """
import json, os, sys
for name, code in json.load(sys.stdin):
    os.mkdir(name)
    os.chdir(name)
    exec(compile(code, name, "exec"), {"__name__": name})
    os.chdir("..")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("examples")
    there = [(name, EXAMPLES[name]) for name, package, *_ in CASES if importlib.util.find_spec(package) is not None]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], input=json.dumps(there),
        cwd=home, env=environment(PYTHONPATH=str(ROOT), **OFFLINE), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return home


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package", "steps", "modules"), CASES, ids=[c[0] for c in CASES])
def test_an_example_records_what_it_trains(folder, name, package, steps, modules):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    (path,) = (folder / name / "runs").iterdir()
    run = precdoctor.open_run(path)
    assert run.steps()["step"].tolist() == list(range(steps)) and run.steps()["sampled"].all()
    assert all(rank.complete for rank in run.ranks)
    assert modules <= set(run.tensors(filters=[("kind", "==", "output")])["module"])
    assert precdoctor.diagnose(run).verdict == "clean"
