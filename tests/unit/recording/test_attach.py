from __future__ import annotations

import datetime as dt
import functools
import io
import os
import signal
import sys
import types

import pytest

from precdoctor.recording.process import attach
from precdoctor.recording.process.launch import default_run_directory, why_nothing_armed

# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch):
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"RANK": "3", "SLURM_PROCID": "5"}, 3),
        ({"SLURM_PROCID": "5"}, 5),
        ({"OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({"RANK": "", "PMI_RANK": "1"}, 1),
        ({"RANK": "first"}, 0),
        ({"RANK": "-1"}, 0),
    ],
)
def test_the_rank_is_what_the_launcher_set(no_launcher, monkeypatch, variables, rank):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert attach.global_rank() == rank


def test_a_process_group_knows_better(no_launcher, monkeypatch):
    group = types.SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 7)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setenv("RANK", "3")
    assert attach.global_rank() == 7


# --- speaking ---------------------------------------------------------------------------------------------------------


class Broken(io.StringIO):
    def write(self, text):
        raise RuntimeError("a logger of the user's")


@pytest.mark.parametrize("stderr", [None, Broken(), "closed"])
def test_saying_something_never_raises_and_never_takes_stdout(monkeypatch, capsys, stderr):
    if stderr == "closed":
        stderr = io.StringIO()
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    attach.say("hello")
    assert capsys.readouterr().out == ""


# --- whose exception --------------------------------------------------------------------------------------------------


class Stopper:
    def __call__(self, number, frame):
        raise TimeoutError

    def method(self, number, frame):
        raise TimeoutError


def stopper(number, frame):
    raise TimeoutError


@pytest.mark.parametrize("handler", [stopper, Stopper(), Stopper().method, functools.partial(stopper)])
def test_an_exception_of_a_signal_handler_is_told_from_ours(handler):
    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError) as theirs:
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(ZeroDivisionError) as ours:
            _ = 1 / 0
        assert attach.raised_by_signal_handler(theirs.value)
        assert not attach.raised_by_signal_handler(ours.value)
    finally:
        signal.signal(signal.SIGUSR1, previous)


# --- whose line -------------------------------------------------------------------------------------------------------


def caller(file: str, *packages: str):
    """What a call from ``file`` would find, itself called from here."""
    names = {"attach": attach, "packages": packages}
    exec(compile("\n\nfound = attach.caller_outside(*packages)", file, "exec"), names)
    return names["found"]


def test_the_innermost_line_outside_of_frameworks_is_found(monkeypatch):
    framework = types.ModuleType("framework")
    framework.__file__ = "/opt/framework/__init__.py"
    monkeypatch.setitem(sys.modules, "framework", framework)
    assert caller("/home/me/train.py", "framework") == ("/home/me/train.py", 3)
    assert caller("/home/me/framework/train.py", "framework") == ("/home/me/framework/train.py", 3)
    assert caller("/opt/framework/loop.py", "framework")[0].endswith("test_attach.py")  # the next one outwards
    # the user's own line before one of an installed package
    assert caller("/opt/site-packages/other/train.py")[0].endswith("test_attach.py")


def test_a_folder_called_like_a_package_is_not_the_package(monkeypatch):
    package = types.ModuleType("framework")
    package.__file__ = "/opt/site-packages/framework/__init__.py"
    monkeypatch.setitem(sys.modules, "framework", package)
    assert attach._directory_of("framework") == "/opt/site-packages/framework/"
    assert attach._directory_of("not_loaded") is None
    assert not "/home/me/framework/train.py".startswith(attach._directory_of("framework"))


def test_our_own_frames_are_named_from_the_package_down():
    with pytest.raises(TypeError) as ours:
        attach.glob_allows(("a",), (), None)
    assert attach.innermost_own_frame(ours.value).startswith("recording/attach.py:")
    with pytest.raises(ZeroDivisionError) as theirs:
        _ = 1 / 0
    assert attach.innermost_own_frame(theirs.value) is None


@pytest.mark.parametrize(
    ("include", "exclude", "module", "allowed"),
    [
        ((), (), "a.b", True),
        (("a.*",), (), "a.b", True),
        (("a.*",), (), "b", False),
        ((), ("*.b",), "a.b", False),
        (("a.*",), ("a.b",), "a.b", False),
        (("A.*",), (), "a.b", False),
    ],
)
def test_globs(include, exclude, module, allowed):
    assert attach.glob_allows(include, exclude, module) is allowed


# --- the launcher -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        (["python", "train.py", "--config", "other.py"], "train"),
        (["python", "-m", "pkg.train", "--lr", "1"], "pkg.train"),
        (["torchrun", "--nproc-per-node", "8", "runs/pre train.py"], "pre-train"),
        (["/usr/bin/tool"], "tool"),
        (["..."], "run"),
        (["python", "-m"], "python"),
    ],
)
def test_a_run_is_named_after_its_script(command, stem):
    now = dt.datetime(2026, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc)
    path = default_run_directory(command, now)
    assert str(path) == f"precdoctor-runs/{stem}-20260203T040506Z-{os.getpid()}"


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        ("", "no Python process of the command loaded precdoctor"),
        ('{"event": "boot"}', "the command never imported torch"),
        ('{"event": "boot"}\n{"event": "torch"}\n{"ev', "torch was imported, but no module was ever called"),
        ('not json\n[]\n{"event": "boot"}', "the command never imported torch"),
        ('{"event": "boot"}\n{"event": "error", "executable": "py", "message": "m"}', "could not start in py: m"),
        ('{"event": "torch"}\n{"event": "armed"}', "its directory is gone"),
        ("\udcff", "no Python process"),
    ],
)
def test_why_nothing_was_recorded(tmp_path, notes, reason):
    (tmp_path / "attach.jsonl").write_bytes(notes.encode("utf-8", "surrogateescape"))
    assert reason in why_nothing_armed(tmp_path)


def test_no_notes_at_all(tmp_path):
    assert "no Python process" in why_nothing_armed(tmp_path)
