"""Two legs lead into a training process; each must carry it alone, and where neither does, one sentence says why."""

from __future__ import annotations

import importlib.metadata
import json
import shutil

import pytest

from tests.support.processes import (
    PYTHON,
    ROOT,
    environment,
    finish,
    interpreter,
    packages_here,
    record,
    script,
    start,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("legs")
    script(folder, "train.py", "import training; training.train(2)")
    # what `pip install --editable` makes of it, without depending on how this interpreter got its precdoctor
    interpreter(folder / "installed", paths=[ROOT, *packages_here()], boot=True)
    interpreter(folder / "from_tree", paths=packages_here())
    interpreter(folder / "without")
    return folder


@pytest.mark.slow
def test_the_pth_file_alone(folder):
    """-I and -E ignore PYTHONPATH, and a shell script may overwrite it."""
    python = folder / "installed/bin/python"
    train = f"import sys; sys.path.insert(0, {str(folder)!r}); import training; training.train(2)"  # -I has no cwd
    commands = [f"PYTHONPATH=/nowhere {python} train.py", *(f'{python} {flag} -c "{train}"' for flag in ("-I", "-E"))]
    run = record(folder, "--", "sh", "-ec", "\n".join(commands), run=folder / "pth")
    assert run.status == 0, run.err
    assert list(run.ranks) == ["rank-00000", "rank-00000.1", "rank-00000.2"]
    assert "recorded 3 processes" in run.err
    for rank in run.ranks:
        assert run.end(rank)["steps"] == 2


@pytest.mark.slow
def test_the_source_tree_alone(folder):
    """This interpreter has torch and pyarrow, and no precdoctor; nothing else of the tree becomes importable."""
    script(folder, "look.py", "import importlib.util, training; print(importlib.util.find_spec('benchmarks'))")
    python = folder / "from_tree/bin/python"
    run = record(folder, "--", "sh", "-ec", f"{python} train.py && {python} look.py", run=folder / "tree")
    assert run.status == 0, run.err
    assert run.steps() == [0, 1]
    assert run.out.endswith(b"None\n")


def test_an_editable_install_has_the_pth_file():
    try:
        installed = importlib.metadata.distribution("precdoctor")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("precdoctor is not installed here")
    boot = [file for file in installed.files or () if str(file) == "precdoctor-boot.pth"]
    assert boot, "the wheel has no precdoctor-boot.pth at its root"
    assert boot[0].read_text() == (ROOT / "precdoctor-boot.pth").read_text()


def test_an_interpreter_without_precdoctor(folder):
    """A precdoctor in site-packages is not grafted onto another interpreter: what it needs is compiled for its own."""
    packages = folder / "elsewhere/site-packages"
    shutil.copytree(ROOT / "precdoctor", packages / "precdoctor", ignore=shutil.ignore_patterns("__pycache__"))
    begin = f"import sys; sys.path.insert(0, {str(packages)!r}); from precdoctor.cli import main; sys.exit(main())"
    command = [PYTHON, "-c", begin, "record", "-o", "bare", "--", str(folder / "without/bin/python"), "-c", "print(1)"]
    run = finish(start(folder, command), folder / "bare")
    assert (run.status, run.out) == (0, b"1\n")
    (said,) = run.said
    assert said == (
        "nothing was recorded: no Python process of the command loaded precdoctor: its interpreter has no precdoctor "
        "installed (install it there), or a launcher dropped the environment variable PRECDOCTOR_RUN"
    )


def test_an_interpreter_that_lacks_what_the_recorder_needs(folder):
    """torch is there, pyarrow is not: the training goes on, and the sentence names the interpreter and the package."""
    script(folder, "without_arrow/pyarrow.py", "raise ModuleNotFoundError(\"No module named 'pyarrow'\")")
    env = environment(PYTHONPATH=str(folder / "without_arrow"))
    # the parent needs its own pyarrow: -E keeps it from the user's PYTHONPATH, which the child still gets
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from precdoctor.cli import main; sys.exit(main())"
    command = [PYTHON, "-E", "-c", begin, "record", "-o", "arrow", "--", PYTHON, "train.py"]
    run = finish(start(folder, command, env), folder / "arrow")
    assert run.status == 0, run.err
    assert run.out.count(b"0x") == 2  # two losses
    sentence = "the recorder cannot start (ModuleNotFoundError: No module named 'pyarrow')"
    assert run.said == [
        f"{sentence}; training goes on unrecorded",
        f"nothing was recorded: the recorder could not start in {PYTHON}: {sentence}",
    ]


def test_a_command_that_never_imports_torch(folder):
    run = record(folder, "--", "python", "-c", "print('no torch')", run=folder / "no_torch")
    assert (run.status, run.out) == (0, b"no torch\n")
    assert run.said == ["nothing was recorded: the command never imported torch"]


def test_a_command_that_fails_before_it_trains(folder):
    run = record(folder, "--", "python", "-c", "raise SystemExit(9)", run=folder / "fails")
    assert run.status == 9
    assert run.said == [
        "nothing was recorded: the command never imported torch (the command itself ended with status 9)"
    ]


@pytest.mark.slow
def test_torch_without_a_module_call(folder):
    run = record(folder, "--", "python", "-c", "import torch; torch.ones(1).sum()", run=folder / "no_module")
    assert run.status == 0
    assert run.said == [
        "nothing was recorded: torch was imported, but no module was ever called and no optimizer stepped"
    ]


@pytest.mark.slow
def test_a_model_that_is_trained_by_torch_func_alone(folder):
    """Gradients of pure functions, and weights in a dictionary: neither a backward pass nor a step is seen."""
    code = """
import torch
net, x = torch.nn.Linear(1, 1), torch.ones(1)
torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)).sum())(dict(net.named_parameters()))
"""
    run = record(folder, "--", "python", "-c", code, run=folder / "pure")
    assert run.status == 0
    assert run.said[0].startswith("nothing was recorded: a model was called inside torch.func, where")


@pytest.mark.parametrize("command", [("env", "-i", PYTHON, "-c", ""), (PYTHON, "-S", "-E", "-c", ""), ("true",)])
def test_a_command_out_of_reach(tmp_path, command):
    run = record(tmp_path, "--", *command)
    assert run.status == 0
    assert len(run.said) == 1
    assert run.said[0].startswith("nothing was recorded: no Python process of the command loaded precdoctor")


def test_notes_are_json_whatever_the_interpreter_is_called(tmp_path, monkeypatch):
    from precdoctor._attach_file import note as add_note

    monkeypatch.setattr("sys.executable", '/o"dd\\ \n\udcff/python')
    add_note(str(tmp_path), "error", 'it "broke"\nbadly')
    note = json.loads((tmp_path / "attach.jsonl").read_text())
    assert note["message"] == 'it "broke" badly'
    assert note["executable"].startswith('/o"dd\\ ')
    add_note(str(tmp_path / "gone"), "boot")  # never raises
