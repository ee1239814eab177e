"""What cannot be recorded is refused before anything starts: one sentence, exit status 2, nothing left behind."""

from __future__ import annotations

import os

import pytest

from tests.support.processes import record, script


def refused(run) -> str:
    assert run.status == 2
    assert run.out == b""
    assert run.err.count("\n") == 1, run.err
    assert run.err.startswith("precdoctor: ")
    return run.said[0]


@pytest.fixture
def folder(tmp_path):
    script(tmp_path, "train.py", "print('started')")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "broken").write_text("neither a program nor a script")
    (tmp_path / "broken").chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["trian.py"], "no script 'trian.py' in {folder}; check the path"),
        (["python", "trian.py"], "no script 'trian.py' in {folder}; check the path"),
        (["pyhton", "train.py"], "no program named 'pyhton' was found; check the spelling or give its path"),
        (["./tool"], "'./tool' is not executable; make it so with chmod +x, or put its interpreter before it"),
        ([".."], "'..' is a directory; name a program or a script, as in: precdoctor record -- python train.py"),
        (["./broken"], "cannot start './broken': Exec format error"),
        ([], "nothing to record; type what you would run, as in: precdoctor record -- python train.py"),
    ],
)
def test_a_command_that_cannot_be_started(folder, command, sentence):
    run = record(folder, "--", *command)
    assert refused(run) == sentence.format(folder=folder)
    assert not run.run.exists()


def test_an_output_directory_that_cannot_be_made(folder):
    """A file in the way stands in for missing permissions, which root has."""
    run = record(folder, "train.py", run=folder / "tool" / "run")
    assert refused(run) == f"cannot create the run directory {folder}/tool/run: Not a directory"


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_output_directory_without_permission(folder):
    (folder / "closed").mkdir(mode=0o555)
    run = record(folder, "train.py", run=folder / "closed" / "run")
    assert refused(run) == f"cannot create the run directory {folder}/closed/run: Permission denied"


def test_an_output_directory_that_is_taken(folder):
    first = record(folder, "train.py")
    assert first.status == 0
    again = record(folder, "train.py")
    assert refused(again) == (
        f"{folder}/run already exists; give another directory with -o, or replace it with --force "
        "(in Python: force=True)"
    )
    assert record(folder, "--force", "train.py").out == b"started\n"


def test_force_does_not_remove_what_is_not_a_run(folder):
    (folder / "results").mkdir()
    (folder / "results" / "thesis.tex").write_text("years")
    run = record(folder, "--force", "train.py", run=folder / "results")
    assert refused(run) == f"{folder}/results is not a precdoctor run, so --force does not remove it; give another -o"
    assert (folder / "results" / "thesis.tex").exists()


@pytest.mark.parametrize(("flag", "value"), [("--every", "3"), ("--steps", "5:2"), ("--first-step", "-1")])
def test_values_that_cannot_be_taken(folder, flag, value):
    run = record(folder, flag, value, "train.py")
    assert value in refused(run)
    assert not run.run.exists()
