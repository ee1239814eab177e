from __future__ import annotations

import sys

import pytest


@pytest.fixture
def launched(monkeypatch):
    """What `record` hands to the launcher, which is replaced."""
    from precdoctor.recording.process import launch as module

    calls = []

    def launch(command, run, options, *, force, **_more):
        calls.append((command, run, options, force))
        return 7

    monkeypatch.setattr(module, "launch", launch)
    return calls


def record(*args: str) -> int:
    from precdoctor.cli import main

    return main(["record", *args])


def test_everything_from_the_first_positional_on_belongs_to_the_child(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    python = [sys.executable]
    cases = {
        ("--", "python", "train.py", "--every", "3"): ["python", "train.py", "--every", "3"],
        ("python", "train.py", "--help"): ["python", "train.py", "--help"],
        ("--", "env", "--chdir", "/", "t.py", "--", "x"): ["env", "--chdir", "/", "t.py", "--", "x"],
        ("train.py", "--strict"): [*python, "train.py", "--strict"],
        ("-m", "pkg.train", "--lr", "1", "-o", "x"): [*python, "-m", "pkg.train", "--lr", "1", "-o", "x"],
        ("--module", "pkg.train", "-h"): [*python, "-m", "pkg.train", "-h"],
        ("--", "-m", "pkg.train", "--lr"): [*python, "-m", "pkg.train", "--lr"],
    }
    for args, command in cases.items():
        assert record(*args) == 7  # the child's own status
        assert launched.pop()[0] == command, args


def test_flags_reach_the_recorder(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [
        "-o",
        "out",
        "--force",
        "--every",
        "4",
        "--steps",
        "8:64",
        "--include",
        "a.*",
        "--include",
        "b",
        "--exclude=c",
    ]
    more = ["--first-step", "100", "--scene-memory", "1GiB", "--max-disk", "2GB", "--redact-names", "--strict"]
    assert record(*flags, *more, "-m", "pkg") == 7
    command, run, options, force = launched.pop()
    assert (command, str(run), force) == ([sys.executable, "-m", "pkg"], "out", True)
    assert (options.every, options.steps, options.include, options.exclude) == (4, (8, 64), ("a.*", "b"), ("c",))
    assert (options.first_step, options.scene_memory, options.max_disk) == (100, 1 << 30, 2_000_000_000)
    assert options.redact_names and options.strict


def test_settings_reach_the_recorder(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precdoctor.toml").write_text('[record]\nevery = 8\nexclude = ["head"]\n')
    monkeypatch.setenv("PRECDOCTOR_RECORD_STRICT", "1")
    record("--every", "2", "--", "env")
    options = launched.pop()[2]
    assert (options.every, options.exclude, options.strict) == (2, ("head",), True)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "nothing to record"),
        (["--every", "3", "--", "env"], "not a power of two"),
        (["--steps", "9:3", "--", "env"], "--steps: '9:3'"),
        (["--max-disk", "lots", "--", "env"], "--max-disk: 'lots' is not a size"),
        (["--evry", "3", "--", "env"], "--every"),
        (["missing.py"], "no script 'missing.py'"),
        (["--", "--every", "3"], "no program named '--every'"),
        (["--", "-m"], "needs the name of a module"),
    ],
)
def test_bad_usage_starts_nothing(launched, tmp_path, monkeypatch, capsys, args, complaint):
    monkeypatch.chdir(tmp_path)
    assert record(*args) == 2
    assert complaint in capsys.readouterr().err
    assert not launched


FIX = "schema_version = 1\n[[prescription]]\n"
CHANGE = "apply = true\n[[prescription.change]]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{FIX}speed = 'fast'\n", "unknown entry 'speed'"),
        (f"{FIX}{CHANGE}setting = 'lr'\nto = 1\n", "no setting 'lr'"),
        (f"{FIX}{CHANGE}setting = 'scaler.init_scale'\nto = 'high'\n", "takes a number above 0, got 'high'"),
        (FIX, "nothing that can be applied"),
    ],
)
def test_a_prescription_it_does_not_know_is_refused_before_the_run(launched, tmp_path, capsys, text, says):
    (tmp_path / "fix.toml").write_text(text)
    assert record("--apply", str(tmp_path / "fix.toml"), "--", "python") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert says in line and not launched


def test_a_prescription_reaches_the_recorder_and_run_json(monkeypatch, tmp_path):
    from precdoctor.recording.process import launch as module

    given = []
    monkeypatch.setattr(module, "launch", lambda _command, _run, options, **more: given.append((options, more)) or 0)
    (tmp_path / "fix.toml").write_text(f"{FIX}{CHANGE}setting = 'optimizer.eps'\nfrom = 1e-4\nto = 1e-9\n")
    assert record("--apply", str(tmp_path / "fix.toml"), "--", "python") == 0
    [(options, more)] = given[:1]
    assert options.apply == ({"setting": "optimizer.eps", "from": 1e-4, "to": 1e-9},) and not options.bit_neutral
    assert [p["change"] for p in more["applied"]["prescriptions"]] == [list(options.apply)]
    assert more["applied"]["file"] == str(tmp_path / "fix.toml")
    assert record("--redact-names", "--apply", str(tmp_path / "fix.toml"), "--", "python") == 0
    redacted = given[1][1]["applied"]
    assert "file" not in redacted and "title" not in redacted["prescriptions"][0]


def test_halt_on_takes_codes_names_and_error_and_nothing_else(monkeypatch, capsys):
    from precdoctor.recording.process import launch as module

    given = []
    monkeypatch.setattr(module, "launch", lambda _command, _run, options, **more: given.append((options, more)) or 0)
    assert record("--halt-on", "PD2,error", "--halt-on", "loss-scale-collapse", "--", "python") == 0
    assert record("--on-finding", "cat", "--", "python") == 0
    assert record("--", "python") == 0
    assert [options.may_halt for options, _ in given] == [True, False, False]
    assert [more["online"] is not None for _, more in given] == [True, True, False]
    assert given[1][1]["online"].command == "cat"
    assert record("--halt-on", "PD999", "--", "python") == 2
    assert "PD999" in capsys.readouterr().err


def test_a_reference_needs_somebody_to_tell(launched, capsys):
    assert record("--reference", "runs/healthy", "--", "python") == 2
    assert "add --halt-on CODES or --on-finding CMD" in capsys.readouterr().err and not launched


def test_a_reference_lends_its_codes_to_halt_on(monkeypatch, tmp_path, capsys):
    from precdoctor.recording.process import launch as module
    from tests.support.training import Training

    given = []
    monkeypatch.setattr(module, "launch", lambda _command, _run, _options, **more: given.append(more) or 0)
    Training(4).write(tmp_path / "healthy")
    assert record("--reference", str(tmp_path / "healthy"), "--halt-on", "loss-above-reference", "--", "python") == 0
    assert given[0]["online"].look(tmp_path / "healthy", True) == []
    assert record("--halt-on", "loss-above-reference", "--", "python") == 2
    assert "loss-above-reference" in capsys.readouterr().err
