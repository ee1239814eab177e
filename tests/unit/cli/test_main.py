"""The program as a shell sees it: status, stdout, stderr."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from precdoctor import __version__
from precdoctor.cli import BROKEN_PIPE, INTERRUPTED, main
from precdoctor.cli.values import OUTPUT_FORMATS
from tests.support.hostile import NAMES
from tests.support.offenders import check_each
from tests.support.processes import ROOT
from tests.support.runs import write_run
from tests.support.schemas import schema


def rows(last=math.nan, module="blocks.0", bad=4):
    """Six healthy steps of one module and, unless ``bad`` is 0, a seventh on which its output is NaN."""
    tensors, steps = [], []
    for step in range(7):
        broken = bad if step == 6 else 0
        common = {
            "step": step,
            "dtype": "float32",
            "numel": 64,
            "amax": 2.0,
            "exp_lo": 0,
            "exp_hist": [64],
            "sum_sq": 64.0,
        }
        tensors.append({**common, "module": "embed", "kind": "output", "order": 0})
        first_bad = 1 if broken else None
        tensors.append(
            {**common, "module": module, "kind": "output", "order": 1, "nan": broken, "first_bad_order": first_bad}
        )
        loss = last if broken else 1.0
        steps.append({"step": step, "loss": loss, "non_finite": int(bool(broken)), "recorder_ns": 1, "step_ns": 100})
    return tensors, steps


@pytest.fixture
def bad_run(tmp_path):
    return write_run(tmp_path / "bad", *rows())


@pytest.fixture
def good_run(tmp_path):
    return write_run(tmp_path / "good", *rows(bad=0))


def test_no_arguments_print_help_with_three_examples(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.count("  precdoctor ") >= 3
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"precdoctor {__version__}\n"


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["diagnose", "nowhere"], "there is no run directory nowhere"),
        (["gate"], "missing argument"),
        (["diagnose", "--fail-on", "eror"], "did you mean 'error'"),
        (["show", "--top", "many"], "'many' is not a whole number"),
        (["explain", "PD999"], "no rule is called 'pd999'"),
        (["diagnose", "--select", "PD9"], "no rule"),
    ],
)
def test_bad_usage_is_one_sentence_and_status_2(args, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "x" / "precdoctor-runs" / "r", *rows()).parents[1])
    assert main(args) == 2
    captured = capsys.readouterr()
    assert complaint.lower() in captured.err.lower()
    assert captured.err.startswith(("precdoctor: ", "newest run: "))
    assert "Traceback" not in captured.err and not captured.out


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["diagnos"], "no such command: diagnos; did you mean 'diagnose'? see precdoctor --help"),
        (["reprot"], "no such command: reprot; did you mean 'report'? see precdoctor --help"),
        (["foo"], "no such command: foo; see precdoctor --help"),
        (["train.py"], "no such command: train.py; to record it, type: precdoctor record -- python train.py"),
        (["diagnose", "--any-size"], "--any-size comes before the command: precdoctor --any-size diagnose"),
        (["record", "python train.py"], "no script 'python train.py' in "),
        (["record", "--budget", "1", "train.py"], "--budget: '1' has no percent sign; write one such as 1% or 0.5%"),
        (["log", "verfiy"], "no such command: verfiy; did you mean 'verify'? see precdoctor log --help"),
        (["diagnose", "--outputformat", "json"], "did you mean '--output-format'? see precdoctor diagnose --help"),
        (["diagnose", "--fail_on", "error"], "no such option: --fail_on; did you mean '--fail-on'?"),
        (["diagnose", "--foo"], "no such option: --foo; see precdoctor diagnose --help"),
        (["explain", "PD999"], "no rule is called 'PD999'; `precdoctor explain` lists the rules"),
        (["explain", "PD10"], "no rule is called 'PD10'; PD101 to PD108 begin like this, name one"),
        (["explain", "PD101."], "did you mean 'PD101'?"),
        (["explain", "dead-layr"], "did you mean 'dead-layer'?"),
        (["explain", "loss"], "no rule is called 'loss'; `precdoctor explain` lists the rules"),
        (["diagnose", "--select", "PD999"], "no rule is called 'PD999'; `precdoctor explain` lists the rules"),
        (["diagnose", "train-2"], "there is no run directory train-2; did you mean precdoctor-runs/train-1?"),
        (["diagnose", "precdoctor-runs/trian-1"], "did you mean precdoctor-runs/train-1?"),
        (["diagnose", "trian.py"], "there is no run directory trian.py; record one with: precdoctor record"),
        (["diagnose", "precdoctor-runs"], "name a run in it, such as precdoctor-runs/train-1"),
    ],
)
def test_a_slip_of_the_fingers_gets_a_sensible_hint_or_none(args, complaint, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "precdoctor-runs" / "train-1", *rows())
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1
    assert ("did you mean" in said) == ("did you mean" in complaint)


def test_the_newest_run_is_taken_and_named_on_stderr(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose"]) == 2
    assert "there is no run below precdoctor-runs/" in capsys.readouterr().err
    write_run(tmp_path / "precdoctor-runs" / "train-1", *rows())
    assert main(["diagnose"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "newest run: precdoctor-runs/train-1\n"
    assert "PD101" in captured.out


def test_diagnose_exits_with_0_unless_asked(bad_run, good_run, capsys):
    for run, level, status in (
        (bad_run, [], 0),
        (bad_run, ["--fail-on", "error"], 1),
        (bad_run, ["--fail-on", "error", "--ignore", "PD1"], None),
        (good_run, ["--fail-on", "warning", "--select", "PD101"], 0),
    ):
        for shape in ("full", "concise", "json"):  # the status never depends on the format
            found = main(["diagnose", str(run), "--output-format", shape, *level])
            status = found if status is None else status
            assert found == status, (run, level, shape)
    assert "No findings" in capsys.readouterr().out


def test_json_is_valid_and_alone_on_stdout(bad_run, capsys):
    assert main(["diagnose", str(bad_run), "--output-format", "json", "--fail-on", "error"]) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    jsonschema.validate(report, schema())
    assert report["exit_code"] == 1 and report["findings"][0]["code"] == "PD101"
    assert captured.err == ""


def test_output_files_are_announced_and_not_overwritten(bad_run, tmp_path, capsys):
    file = tmp_path / "out.json"
    args = ["diagnose", str(bad_run), "--output-format", "json", "-o", str(file)]
    assert main(args) == 0
    assert f"Wrote {file}" in capsys.readouterr().err
    before = file.read_text()
    assert main(args) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*args, "--force"]) == 0
    assert file.read_text() == before
    assert main(["diagnose", str(bad_run), "-o", str(tmp_path / "no" / "such" / "dir.txt")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_unreadable_runs_have_status_3_and_no_traceback(tmp_path, bad_run, capsys):
    empty = write_run(tmp_path / "empty")
    newer = write_run(tmp_path / "newer", *rows())
    info = json.loads((newer / "run.json").read_text())
    (newer / "run.json").write_text(json.dumps({**info, "schema_version": 99}))
    part = next(bad_run.glob("rank-00000/tensors-*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])
    text = tmp_path / "text"
    text.write_text("not a run")
    for path, status in ((empty, 3), (newer, 3), (bad_run, 3), (text, 2), (tmp_path, 2)):
        for command in ("diagnose", "gate"):
            assert main([command, str(path)]) == status, (command, path)
            err = capsys.readouterr().err
            assert err.startswith("precdoctor: ") and err.count("\n") == 1 and "Traceback" not in err
    assert main(["log", "verify", str(bad_run)]) == 3


def test_a_name_that_no_path_can_have_is_one_sentence(bad_run, tmp_path, capsys):
    long, run = str(tmp_path / ("n" * 5000)), str(bad_run)
    for args in (
        ["diagnose", long], ["compare", run, long], ["log", "verify", long], ["gate", run, "--baseline", long],
        ["report", run, "-o", long], ["export", run, "--to", "csv", "-o", long],
    ):  # fmt: skip
        assert main(args) == 2
        said = capsys.readouterr().err
        assert said.startswith("precdoctor: ") and said.count("\n") == 1 and "name" in said, said[:200]


def test_a_path_without_permission_is_one_sentence(bad_run, monkeypatch, capsys):
    def refuse(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.X_OK)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", refuse)
        assert main(["diagnose", str(bad_run)]) == 3
        assert capsys.readouterr().err == f"precdoctor: cannot read {bad_run}/run.json: Permission denied\n"
    with monkeypatch.context() as patch:
        exists = Path.exists
        patch.setattr(Path, "exists", lambda self: refuse(self) if self == bad_run else exists(self))
        assert main(["diagnose", str(bad_run)]) == 3
        assert capsys.readouterr().err == f"precdoctor: cannot read {bad_run}/run.json: Permission denied\n"
    with monkeypatch.context() as patch:
        is_dir = Path.is_dir
        patch.setattr(Path, "is_dir", lambda self: refuse(self) if self.name == "a.html" else is_dir(self))
        assert main(["report", str(bad_run), "-o", "there/a.html"]) == 2
        assert capsys.readouterr().err.startswith("precdoctor: there/a.html: Permission denied; check the permissions")


def test_rule_options_come_from_the_file(bad_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precdoctor.toml").write_text("[rules.PD101]\nconfidence = 0.25\n")
    assert main(["diagnose", str(bad_run), "--output-format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["confidence"] == 0.25
    (tmp_path / "precdoctor.toml").write_text("[rules.PD101]\nconfidnce = 0.25\n")
    assert main(["diagnose", str(bad_run)]) == 2
    assert "'confidence'" in capsys.readouterr().err


def test_a_defect_of_ours_shows_a_traceback_and_asks_for_a_report(monkeypatch, capsys):
    from precdoctor.diagnosis import registry

    monkeypatch.setattr(registry, "find", lambda *_: 1 / 0)
    assert main(["explain", "PD101"]) == 2
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "please report it" in err


@pytest.mark.parametrize(
    ("import_error", "is_ours"),
    [
        (ImportError("pyarrow requires NumPy 2.0 or newer, found 1.26.4"), False),
        (ImportError("cannot import name 'find' from 'precdoctor.x'", name="precdoctor.x"), True),
    ],
)
def test_a_package_that_cannot_be_imported_is_one_sentence(monkeypatch, capsys, import_error, is_ours):
    from precdoctor.diagnosis import registry

    def fail(*_):
        raise import_error

    monkeypatch.setattr(registry, "find", fail)
    assert main(["explain", "PD101"]) == 2
    err = capsys.readouterr().err
    sentence = f"precdoctor: a package that precdoctor needs cannot be imported: {import_error}\n"
    assert ("Traceback" in err) == is_ours
    assert (err == sentence) != is_ours


def test_the_gate_says_expected_found_and_limit(bad_run, good_run, capsys):
    assert main(["gate", str(good_run), "--ignore", "PD1,PD2,PD3,PD4,PD5"]) in (0, 2)
    capsys.readouterr()
    statuses = set()
    for shape in ("full", "concise", "json"):
        statuses.add(main(["gate", str(bad_run), "--baseline", str(good_run), "--output-format", shape]))
        out = capsys.readouterr().out
        if shape == "json":
            report = json.loads(out)
            jsonschema.validate(report, schema())
            failing = [c for c in report["gate"]["checks"] if c["fails"]]
            assert {"PD101 nonfinite-origin-forward", "PD805 new-nonfinite-tensors"} <= {c["check"] for c in failing}
            assert report["exit_code"] == 1 and report["gate"]["baseline"] == str(good_run)
        else:
            assert out.startswith("FAILED: ") and "expected finite, found" in out and ", limit 0" in out
    assert statuses == {1}


@pytest.mark.parametrize("shape", OUTPUT_FORMATS)
def test_the_exit_status_is_the_same_in_every_format(shape, bad_run, good_run, capsys):
    for command in (["gate"], ["diagnose", "--fail-on", "error"]):
        assert main([*command, str(bad_run), "--output-format", shape]) == 1
        assert main([*command, str(good_run), "--output-format", shape]) == 0
    assert capsys.readouterr().out


def test_several_formats_at_once(bad_run, tmp_path, capsys):
    summary = tmp_path / "summary.md"
    summary.touch()  # a CI runner makes it before the job
    junit = tmp_path / "gate.xml"
    also = ["--also", f"markdown={summary}", "--also", f"junit={junit}"]
    assert main(["gate", str(bad_run), *also, "--output-format", "github"]) == 1
    out = capsys.readouterr()
    assert out.out.startswith("::error ") and out.err.count("Wrote ") == 2
    assert summary.read_text().startswith("## precdoctor failed") and "<testsuites" in junit.read_text()
    assert main(["gate", str(bad_run), "--also", f"junit={junit}"]) == 2
    assert "already there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("junit", "--also takes FORMAT=FILE"),
        ("jnit=x.xml", "did you mean 'junit'?"),
        ("junit=", "--also takes FORMAT=FILE"),
    ],
)
def test_bad_further_formats(entry, complaint, bad_run, capsys):
    assert main(["diagnose", str(bad_run), "--also", entry]) == 2
    out = capsys.readouterr()
    assert complaint in out.err and out.out == ""


def test_a_gate_without_a_verdict_says_why(tmp_path, capsys):
    killed = write_run(tmp_path / "killed", *rows(bad=0), end=False)
    assert main(["gate", str(killed)]) == 3
    out = capsys.readouterr().out
    assert out.startswith("NO TRUSTWORTHY VERDICT")
    assert "killed" in out or "missing" in out


def test_thresholds_of_the_gate_do_not_disturb_diagnose(bad_run, good_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precdoctor.toml").write_text("[rules.PD803]\nbinades = 40.0\n[gate]\nbaseline = 'good'\n")
    assert main(["diagnose", str(bad_run)]) == 0
    assert main(["gate", str(bad_run)]) == 1
    assert "limit -40 binades" in " ".join(capsys.readouterr().out.split())


def test_explain_knows_the_rules_and_what_the_gate_compares(capsys):
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    *codes, _ = re.findall(r"PD\d{3}", listed)  # the last is an example of what to type
    assert codes == sorted(codes), "by family"
    for code in codes:
        assert main(["explain", code.lower()]) == 0
        assert code in capsys.readouterr().out
    assert "PD801" in listed and "PD101" in listed and "PD810" in listed and "PD823" in listed


@pytest.mark.parametrize(("code", "limit"), [("PD821", "0.01 nats"), ("PD822", "2 binades"), ("PD823", "16")])
def test_explain_knows_what_a_running_training_is_held_to(code, limit, capsys):
    assert main(["explain", code]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert code in page and limit in page and "record --reference" in page


def test_an_interrupt_is_130_and_silent(monkeypatch, capsys):
    from precdoctor.diagnosis import registry

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "find", interrupt)
    assert main(["explain", "PD101"]) == INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_error():
    code = "import sys; from precdoctor.cli import main; input(); sys.exit(main(['explain']))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.close()
        child.stdin.write(b"\n")
        child.stdin.close()
        errors = child.stderr.read()
    assert (child.returncode, errors) == (BROKEN_PIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["explain"], ["diagnose"], ["report", "-o", "-"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_sentence(bad_run, command):
    arguments = [command[0], *([] if command == ["explain"] else [str(bad_run)]), *command[1:]]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "precdoctor", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.splitlines()) == (
        2,
        ["precdoctor: the output cannot be written: No space left on device"],
    )


def test_too_little_memory_is_one_sentence(bad_run, capsys, monkeypatch):
    """Also inside a rule: it is nobody's defect."""

    def none(*_, **__):
        raise MemoryError

    monkeypatch.setattr("precdoctor.diagnosis.survey.arrow_rows.KeptRows.select", none)
    assert main(["diagnose", str(bad_run)]) == 2
    assert capsys.readouterr().err == "precdoctor: there is not enough memory for this\n"


def test_a_reader_that_stops_reading_leaves_the_other_reports_whole(bad_run, tmp_path):
    file = tmp_path / "junit.xml"
    code = f"""if True:
        import sys
        from precdoctor.cli import main
        input()
        sys.exit(main(["gate", {str(bad_run)!r}, "--also", "junit={file}"]))"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.close()
        child.stdin.write(b"\n")
        child.stdin.close()
    assert child.returncode == BROKEN_PIPE
    assert file.read_text().rstrip().endswith("</testsuites>")


def test_reading_a_run_never_imports_torch(bad_run, tmp_path):
    run = str(bad_run)
    commands = [["diagnose", run], ["gate", run], ["show", run], ["report", run, "-o", str(tmp_path / "a.html")]]
    commands.append(["export", run, "--to", "csv", "-o", str(tmp_path / "tables")])
    code = (
        "import sys\nfrom precdoctor.cli import main\n"
        f"print([(main(c), 'torch' in sys.modules) for c in {commands!r}], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == str([(0, False), (1, False), *[(0, False)] * 3])
    assert done.stdout


def test_hostile_names_in_a_log_reach_no_terminal(tmp_path, capsys):
    """Each as the origin of a NaN, and a log that holds them all, to every command that prints names."""
    storable = [n for n in NAMES if "\udcff" not in n]  # a name that is not UTF-8 cannot be logged
    every = [["diagnose"], ["diagnose", "--output-format", "concise"], ["show"], ["log", "verify"], ["gate"]]

    def check(names):
        runs = [rows(module=name) for name in names]
        tensors, steps = [row for run in runs for row in run[0]], runs[0][1]
        info, facts = {"command": ["python", *names]}, {"device": {"name": "".join(names)[:200]}}
        run = write_run(tmp_path / f"{len(names)}-{storable.index(names[0])}", tensors, steps, info=info, facts=facts)
        for command in every if names == storable else (["diagnose"], ["show"]):
            assert main([*command, str(run)]) in (0, 1)
            out = capsys.readouterr().out
            assert re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\u200b]", out) is None
            assert not any(line.lstrip().startswith("::") for line in out.splitlines())

    check_each(check, [storable, *([name] for name in storable)], repr)


def test_a_working_directory_that_is_gone_is_said_to_be(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["diagnose"]) == 2
    assert capsys.readouterr().err == "precdoctor: the working directory has been removed; cd to one that is there\n"


def test_no_gap_is_told_to_a_loss_that_is_no_number(bad_run, good_run, capsys):
    assert main(["compare", str(good_run), str(bad_run)]) == 0
    assert "Loss at step 6: A 1, B nan; differs" in " ".join(capsys.readouterr().out.split())


def test_closed_streams_do_not_change_the_status(bad_run, tmp_path):
    """Neither of a report nor of a recorded command, which finds them closed as it would by itself."""

    def status(command, redirections):
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from precdoctor.cli import main; sys.exit(main())"
        line = shlex.join([sys.executable, "-c", start, *command])
        shell = ["sh", "-c", f"{line} {redirections}"]
        return subprocess.run(shell, cwd=tmp_path, capture_output=True, check=False).returncode

    report = ["diagnose", "--fail-on", "error", str(bad_run)]
    probe = "import os, sys\nn = 64\nfor i in range(3):\n try: os.fstat(i)\n except OSError: n += 1 << i\nsys.exit(n)"
    recorded = ["record", "--", sys.executable, "-c", probe]
    assert status(report, "") == 1
    for closed, bits in (("1>&-", 2), ("2>&-", 4), ("0<&-", 1), ("0<&- 1>&- 2>&-", 7)):
        assert (closed, status(report, closed)) == (closed, 1)
        assert (closed, status(recorded, closed)) == (closed, 64 + bits)
