"""`precdoctor report`: where the file goes, what it never overwrites, and one sentence for every mistake."""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path

import pytest

from precdoctor.cli import main
from precdoctor.reporting.html.page import MARK
from tests.support.runs import write_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "precdoctor-runs" / "train-1", steps=[{"step": 0, "loss": 1.0}])


def test_the_newest_run_goes_into_the_current_directory(run, tmp_path, capsys):
    assert main(["report"]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "newest run: " in said.err and "Wrote train-1.html (" in said.err
    assert (tmp_path / "train-1.html").read_text().startswith(MARK)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["precdoctor-runs", "train-1.html"]


def test_a_report_is_replaced_and_nothing_else(run, tmp_path, capsys):
    file = tmp_path / "train-1.html"
    file.write_text(MARK + "an older one")
    assert main(["report", str(run)]) == 0
    assert "an older one" not in file.read_text()
    file.write_text("my notes")
    assert main(["report", str(run)]) == 2
    assert "already there; give another name, or --force" in capsys.readouterr().err
    assert file.read_text() == "my notes"
    assert main(["report", str(run), "--force"]) == 0
    assert file.read_text().startswith(MARK)


@pytest.mark.parametrize("command", [["report"], ["report", "--force"], ["diagnose"], ["diagnose", "--force"]])
def test_a_device_or_a_pipe_is_written_to_and_stays(run, tmp_path, command):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with concurrent.futures.ThreadPoolExecutor() as readers:
        read = readers.submit(pipe.read_text)
        assert main([*command, str(run), "-o", str(pipe)]) in {0, 1}
        assert "train-1" in read.result()
    assert pipe.is_fifo()


def test_what_a_link_leads_to_is_replaced(run, tmp_path):
    (tmp_path / "latest.html").symlink_to(tmp_path / "kept.html")
    for _ in range(2):
        assert main(["report", str(run), "-o", "latest.html"]) == 0
    assert (tmp_path / "latest.html").is_symlink() and (tmp_path / "kept.html").read_text().startswith(MARK)


def test_a_dash_is_stdout(run, tmp_path, capsys):
    assert main(["report", str(run), "-o", "-"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(MARK) and said.out.endswith("</html>") and said.err == ""
    assert not (tmp_path / "train-1.html").exists()


def test_a_comparison_shows_both_runs(run, tmp_path, capsys):
    other = write_run(tmp_path / "other", steps=[{"step": 0, "loss": 2.0}])
    assert main(["report", str(run), "--against", str(other), "-o", "-"]) == 0
    assert "Against other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["missing"], "missing", 2),
        (["RUN", "--against", "missing"], "missing", 2),
        (["RUN", "-o", "."], "is a directory; name a file in it", 2),
        (["RUN", "-o", "no/such/place.html"], "cannot be written: No such file or directory", 2),
        (["EMPTY"], "holds no training step", 3),
    ],
)
def test_a_mistake_is_one_sentence(run, tmp_path, capsys, arguments, said, status):
    empty = write_run(tmp_path / "empty")
    known = {"RUN": str(run), "EMPTY": str(empty)}
    assert main(["report", *(known.get(a, a) for a in arguments)]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_the_file_has_the_usual_permissions(run, tmp_path):
    previous = os.umask(0o027)
    try:
        assert main(["report", str(run), "-o", "a.html"]) == 0
    finally:
        os.umask(previous)
    assert (tmp_path / "a.html").stat().st_mode & 0o777 == 0o640
