"""How often a command reads a part of a log: once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from precdoctor.cli import main
from precdoctor.runlog import parts
from tests.support.training import Training


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Training(dtype="float16", steps=20).poison(15, "output", "head", nan=1).write(tmp_path / "run").path


@pytest.mark.parametrize(
    "command",
    [
        ["diagnose"],
        ["show"],
        ["report", "-o", "report.html"],
        ["gate"],
        ["gate", "--baseline"],
        ["compare"],
        ["whatif", "--format", "e4m3"],
        ["whatif", "--plan"],
        ["diagnose", "--prescription", "fix.toml"],
    ],
    ids=" ".join,
)
def test_a_command_reads_each_part_once(
    command: list[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read: Counter[str] = Counter()
    original = parts.read_regular

    def counted(path: Path, limit: int) -> bytes:
        read[f"{path.parent.parent.name}/{path.name}"] += 1
        return original(path, limit)

    monkeypatch.setattr(parts, "read_regular", counted)
    name, *options = command
    other = Training(dtype="float16", steps=20).write(tmp_path / "other").path
    match command:
        case ["compare"]:
            arguments = [str(other), str(run)]
        case ["gate", "--baseline"]:
            arguments, options = [str(run), "--baseline", str(other)], []
        case _:
            arguments = [str(run)]
    assert main([name, *arguments, *options]) in (0, 1)
    assert read
    assert {part: count for part, count in read.items() if count > 1} == {}
