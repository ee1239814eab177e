"""Annotations point at a file of the repository at hand, wherever the run was recorded, or at none."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from precdoctor.diagnosis.claims.finding import Diagnosis, Source
from precdoctor.reporting.outputs import WRITERS, Report
from precdoctor.reporting.places import FileLine, file_line, repository_file, script, tracked
from tests.support.diagnoses import BROKEN, OVERFLOW

FILES = {
    "train.py": "import model\nmodel.run()\n",
    "model.py": "import torch\n\nx = torch.matmul(q, k)\n",
    "nets/attention/core.py": "import torch\n",
    "nets/mlp/core.py": "import torch\n\ny = torch.exp(scores)\n",
    "examples/small/run.py": "print(1)\n",
    "examples/large/run.py": "print(2)\n",
}


@pytest.fixture(params=["git", "no git"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository of FILES; once as git lists it, once on a machine that has no git."""
    root = tmp_path / "builds" / "project"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    if request.param == "git":
        if shutil.which("git") is None:
            pytest.skip("git is not installed")
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        subprocess.run(["git", "-C", str(root), "add", "."], check=True)
    else:
        (root / ".git").mkdir()
        monkeypatch.setenv("PATH", str(tmp_path))
    (root / "build" / "lib").mkdir(parents=True)
    (root / "build" / "lib" / "model.py").write_text("an old copy\n")
    monkeypatch.chdir(root)
    tracked.cache_clear()
    yield root
    tracked.cache_clear()


@pytest.mark.parametrize(
    ("file", "home", "found"),
    [
        ("model.py", "/workspace/app", "model.py"),
        ("/workspace/app/model.py", "/workspace/app", "model.py"),
        ("nets/mlp/core.py", "/workspace", "nets/mlp/core.py"),
        ("/opt/src/mlp/core.py", "/", "nets/mlp/core.py"),  # one longest end
        ("C:\\work\\project\\nets\\mlp\\core.py", "C:\\work", "nets/mlp/core.py"),
        ("/workspace/core.py", "/workspace", None),  # two files of that name
        ("run.py", "/workspace/examples", None),
        ("/workspace/other/helper.py", "/workspace", None),
        ("", "/workspace", None),
    ],
)
def test_a_path_of_another_machine_is_the_file_with_the_longest_common_end(
    checkout: Path, file: str, home: str, found: str | None
) -> None:
    assert repository_file(file, home) == found


def test_the_recorded_line_decides_between_files_of_one_name(checkout: Path) -> None:
    assert repository_file("/elsewhere/core.py", "/", 3, "y = torch.exp(scores)") == "nets/mlp/core.py"
    assert repository_file("/elsewhere/core.py", "/", 3, "z = 1") is None
    assert repository_file("/elsewhere/model.py", "/", 3, "another_model()") is None  # the same name, another file
    assert repository_file("/elsewhere/model.py", "/", 3, "x = torch.matmul(q, k)") == "model.py"


def test_paths_are_relative_to_the_root_of_the_repository(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "new.py").write_text("not tracked yet\n")
    monkeypatch.chdir(checkout / "nets")
    assert repository_file("mlp/core.py", str(checkout / "nets")) == "nets/mlp/core.py"
    assert repository_file("new.py", str(checkout)) == "new.py"


def test_outside_a_repository_paths_are_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert repository_file("train.py", str(tmp_path)) == "train.py"
    assert repository_file("/workspace/train.py", str(tmp_path)) is None
    assert repository_file("<stdin>", str(tmp_path)) is None


def recorded(home: str, source: Source, *command: str) -> Diagnosis:
    finding = dataclasses.replace(OVERFLOW, location=dataclasses.replace(OVERFLOW.location, source=source))
    return dataclasses.replace(BROKEN, findings=(finding,), run={**BROKEN.run, "cwd": home, "command": list(command)})


@pytest.mark.parametrize("shape", ["github", "gitlab", "sarif"])
def test_every_annotation_points_at_the_line_of_the_finding(checkout: Path, shape: str) -> None:
    source = Source("/workspace/app/model.py", 3, "x = torch.matmul(q, k)")
    diagnosis = recorded("/workspace/app", source, "torchrun", "train.py")
    stream = io.StringIO()
    WRITERS[shape](Report(diagnosis, 1, "error"), stream)
    if shape == "github":
        assert "::error file=model.py,line=3," in stream.getvalue()
    elif shape == "gitlab":
        assert json.loads(stream.getvalue())[0]["location"] == {"path": "model.py", "lines": {"begin": 3}}
    else:
        [place] = json.loads(stream.getvalue())["runs"][0]["results"][0]["locations"]
        physical = place["physicalLocation"]
        assert (physical["artifactLocation"]["uri"], physical["region"]["startLine"]) == ("model.py", 3)


def test_of_several_runs_the_directory_of_the_finding_s_own_counts(checkout: Path) -> None:
    ours = {"path": "b", "cwd": str(checkout / "nets" / "mlp")}
    finding = dataclasses.replace(
        OVERFLOW,
        location=dataclasses.replace(OVERFLOW.location, source=Source("core.py", 3, None)),
        evidence={"run": "b"},
    )
    runs = {"path": "a, b", "runs": [{"path": "a", "cwd": str(checkout / "nets" / "attention")}, ours]}
    assert file_line(finding, dataclasses.replace(BROKEN, run=runs)) == FileLine("nets/mlp/core.py", 3)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["torchrun", "--nproc-per-node=2", "/workspace/app/train.py"], "train.py"),
        (["python", "-m", "torch.distributed.run", "-m", "nets.mlp.core"], "nets/mlp/core.py"),
        (["python", "-c", "pass"], None),
    ],
)
def test_the_script_stands_in_where_a_finding_names_no_line(
    checkout: Path, command: list[str], file: str | None
) -> None:
    found = script(recorded("/workspace/app", Source("gone.py", 1), *command))
    assert found == (None if file is None else FileLine(file, 1))
