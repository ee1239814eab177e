"""The committed logs: small, intact, about nobody's machine, and in agreement with what is written beside them."""

import getpass
import json
import platform
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precdoctor.cli import main
from precdoctor.runlog import open_run
from precdoctor.runlog.schema import TABLES
from tests.support.offenders import check_each
from tests.support.samples import RULES_DIRECTORY

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(p.parent for p in (ROOT / "sample_runs").glob("*/train.py"))
RUNS = [f / "run" for f in (*FOLDERS, *(p.parent for p in sorted(RULES_DIRECTORY.glob("PD*/*/*/train.py"))))]
LARGEST_RUN = 300_000
#: In POSIX or Windows style. A lone "/" is legal: events write `root/module:kind:name`.
ABSOLUTE_PATH = re.compile(r"""(?:^|[\s"'=:(])(?:/[\w.~-]+){2,}|\b[A-Za-z]:\\\\|/home/|/Users/|/tmp/""")
#: How the run was found, and what read it: not what was found out.
NOT_DIAGNOSIS = {"path", "directory", "version"}


def _name(path: Path) -> str:
    return path.parent.name if path.name == "run" else path.name


def _texts(run: Path) -> list[str]:
    """Everything in a log that is text."""
    opened = open_run(run)
    texts = [p.read_text() for p in (*run.rglob("*.json"), *run.rglob("*.jsonl"))]
    for table in TABLES:
        for column in opened.dataset(table).read_all().unify_dictionaries().columns:
            if pa.types.is_string(column.type) or pa.types.is_dictionary(column.type):
                texts += [v for v in column.unique().to_pylist() if v is not None]
    return texts


def _told(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _told(v) for k, v in value.items() if k not in NOT_DIAGNOSIS}
    return [_told(v) for v in value] if isinstance(value, list) else value


def _check_anonymous(texts: Any) -> None:
    names = [n for n in (platform.node(), getpass.getuser()) if n not in ("root", "localhost")]  # "root" is ours, too
    for text in texts:
        found = ABSOLUTE_PATH.search(text)
        assert found is None, text[max(0, found.start() - 60) : found.end() + 60]
        assert not [n for n in names if re.search(rf"\b{re.escape(n)}\b", text)]


def test_there_are_samples() -> None:
    assert len(FOLDERS) >= 3
    assert len(RUNS) >= len(FOLDERS) + 18


def test_logs_are_small_and_intact(capsys: pytest.CaptureFixture[str]) -> None:
    def check(run: Path) -> None:
        assert sum(p.stat().st_size for p in run.rglob("*") if p.is_file()) < LARGEST_RUN
        assert not (run / "attach.jsonl").exists()
        assert main(["log", "verify", str(run)]) == 0, capsys.readouterr()

    check_each(check, RUNS)


def test_logs_tell_nothing_of_the_machine() -> None:
    check_each(_check_log, RUNS)


def _check_log(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    assert info["options"]["redact_names"] is True
    assert info["cwd"] is None
    assert info["command"] == ["python", "..."]
    assert info["host"]["name"] is None
    assert info["host"]["platform"] in ("Linux", "Darwin")

    _check_anonymous(_texts(run))


@pytest.mark.parametrize("folder", FOLDERS, ids=_name)
def test_diagnosis_is_the_committed_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    as_json, as_text = tmp_path / "diagnosis.json", tmp_path / "diagnosis.txt"

    assert main(["diagnose", "run", "--output-format", "json", "-o", str(as_json)]) == 0
    assert main(["diagnose", "run", "-o", str(as_text)]) == 0

    committed = [(folder / name).read_text() for name in ("diagnosis.json", "diagnosis.txt")]
    assert _told(json.loads(as_json.read_text())) == _told(json.loads(committed[0]))
    assert as_text.read_text() == committed[1]
    _check_anonymous(committed)
