"""`make gpu` from end to end, with the CPU in the GPU's place: the command cannot rot where there is no GPU."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import jsonlines, report
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.runner import LINES_KEPT, SHORTEST_SECONDS, SKIPPED, Runner, Task
from tests.support.processes import PATIENCE, PYTHON, ROOT, environment


def run(*arguments, **variables):
    own = environment(PYTHONPATH=str(ROOT), DEVICE="cpu", **variables)
    return subprocess.run(
        [PYTHON, "-m", *arguments], cwd=ROOT, env=own, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run of every section but the tests; of the checks one, which has nothing to do."""
    out = tmp_path_factory.mktemp("gpu")
    done = run("benchmarks.gpu", OUT=str(out), SECTIONS="env,checks,numbers,training", CHECKS="graph-capture")
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


@pytest.mark.slow
def test_a_line_per_section_ends_the_output(small):
    *_, env, checks, numbers, training, last = small[1].splitlines()
    assert env.startswith("env      1 ok")
    assert checks.startswith("checks   1 skipped")
    assert numbers.startswith("numbers  2 ok")
    assert training.startswith("training 1 ok")
    assert "table is" in last


@pytest.mark.slow
def test_the_table_holds_every_section_and_says_that_it_measured_nothing(small):
    (page,) = small[0].glob("gpu-*.md")
    text = page.read_text()
    assert "The CPU stood in the GPU's place" in text
    for heading in ("Machine", "Checks", "Bandwidth", "Launches", "GPT-2 medium"):
        assert f"## {heading}\n" in text
    assert "| `graph-capture` | skipped |" in text
    assert "What failed" not in text
    for name in ("observe, unsampled", "core, every step", "all and blocks, every step", "default options"):
        assert f"| {name} (1) |" in text
    assert text.count("| E4M3 |") == 4, "two sizes, core and blocks"


@pytest.mark.slow
def test_each_recorded_block_is_held_against_plain_ones(small):
    lines = jsonlines.read(small[0] / "results.jsonl")
    blocks = {line["name"]: line for line in lines if line["section"] == "training" and "said" in line}
    launches = {line["name"]: line["launches"] for line in lines if line["section"] == "launches"}
    assert all(block["ratio"] > 0 and block["off_ms"] > 0 for block in blocks.values())
    said = {name: block["said"] for name, block in blocks.items()}
    assert said["core, every step"]["sampled"] == said["all, every step"]["sampled"] == 3
    assert said["observe, unsampled"]["sampled"] == said["examine, unsampled"]["sampled"] == 0
    assert launches["all, every step"] > launches["core, every step"]
    assert all(found["errors"] == [] for found in said.values())


def test_every_check_runs_here(tmp_path):
    results = tmp_path / "results.jsonl"
    done = run("benchmarks.gpu.checks", "all", "--device", "cpu", "--results", str(results), CUBLAS_WORKSPACE_CONFIG="")
    assert done.returncode == 0, done.stderr
    found = {line["check"]: line["result"] for line in jsonlines.read(results)}
    assert set(found) == set(CHECKS) == set(command.CHECKS)
    needs_a_gpu = {"compiled-long", "compiled-short", "graph-capture", "waits"}
    needs_triton = {name for name in CHECKS if name.startswith(("stat-", "update-"))}
    assert {name for name, result in found.items() if result == "skipped"} <= needs_a_gpu | needs_triton


# --- whatever a process does ------------------------------------------------------------------------------------------


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path / "results.jsonl", tmp_path / "log.txt", time.monotonic() + 60.0, environment())


def test_a_process_that_fails_leaves_its_last_lines_and_the_next_one_runs(runner, tmp_path):
    fails = "for i in range(40): print('line', i)\nraise SystemExit(3)"
    runner.section("checks", [Task("bad", python(fails), 30), Task("good", python("print('fine')"), 30)], 60)
    bad, good = runner.outcomes
    assert (bad["result"], good["result"]) == ("failed", "ok")
    assert bad["tail"] == [f"line {i}" for i in range(40 - LINES_KEPT, 40)]
    assert jsonlines.read(tmp_path / "results.jsonl")[:2] == runner.outcomes
    assert "line 0" in (tmp_path / "log.txt").read_text()
    page = report.markdown(jsonlines.read(tmp_path / "results.jsonl"))
    assert "## What failed" in page and "line 39" in page


def test_a_process_that_hangs_is_ended_with_all_that_it_started(runner, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reading = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = f"import time; pipe = open({str(tmp_path / 'pipe')!r}, 'w'); print('here', file=pipe, flush=True); "
    child += "time.sleep(600)"
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    runner.section("numbers", [Task("hangs", python(hangs), SHORTEST_SECONDS + 0.5)], 60)
    (outcome,) = runner.outcomes
    assert outcome["result"] == "timeout"
    assert any("KeyboardInterrupt" in line for line in outcome["tail"]), "where it hung"
    assert os.read(reading, 100) == b"here\n"
    select.select([reading], [], [], 60)  # a process that has been killed takes a moment to end
    assert os.read(reading, 100) == b"", "nobody holds the other end any more"
    os.close(reading)


def test_what_there_is_no_time_for_is_skipped_and_said(runner):
    runner.section("tests", [Task("late", python(""), 30)], SHORTEST_SECONDS / 2)
    assert [(o["result"], o["tail"]) for o in runner.outcomes] == [("skipped", ["no time left"])]
    lines = [*runner.outcomes]
    assert report.summary(lines, ["tests", "env"]) == ["tests    1 skipped", "env      not run"]


def test_a_process_may_have_nothing_to_do(runner):
    nothing = f"print('some words'); print('no such hardware'); raise SystemExit({SKIPPED})"
    runner.section("checks", [Task("idle", python(nothing), 30)], 60)
    assert [(o["result"], o["tail"]) for o in runner.outcomes] == [("skipped", ["no such hardware"])]


def test_a_program_that_is_not_there_fails_and_nothing_else(runner):
    runner.section("numbers", [Task("ncu", ["/nonexistent/ncu"], 30)], 60)
    assert runner.outcomes[0]["result"] == "failed"
    assert "/nonexistent/ncu" in runner.outcomes[0]["tail"][0]


def test_which_tests_failed_is_kept(runner):
    output = "tests/a.py PASSED\\nFAILED tests/b.py::c - assert 0\\n== 1 failed, 1 passed in 2.00s =="
    (task, _) = command.Plan("cuda", ROOT).tests()
    runner.section("tests", [Task("tests", python(f"print('{output}'); raise SystemExit(1)"), 30, task.keep)], 60)
    (outcome,) = runner.outcomes
    assert outcome["tail"] == ["FAILED tests/b.py::c - assert 0", "== 1 failed, 1 passed in 2.00s =="]
    assert "| tests | failed |" in report.markdown(runner.outcomes)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_line_that_was_cut_short_does_no_harm(tmp_path):
    file = tmp_path / "results.jsonl"
    jsonlines.append(file, {"section": "env", "facts": {"torch": "2.11"}})
    with file.open("a") as to:
        to.write('{"section": "env", "fac')
    assert "| torch | 2.11 |" in report.markdown(jsonlines.read(file))


def test_a_profile_becomes_part_of_the_table(tmp_path):
    header = ["ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"]
    rows = [["0", "_stat", "Duration", "us", "180.1"], ["0", "_stat", "Registers Per Thread", "register/thread", "64"]]
    quoted = "\n".join(",".join(f'"{cell}"' for cell in row) for row in [header, *rows])
    (tmp_path / "ncu.csv").write_text(f"==PROF== Connected\n{quoted}\n")
    command._keep_profile(tmp_path / "ncu.csv", tmp_path / "results.jsonl")
    page = report.markdown(jsonlines.read(tmp_path / "results.jsonl"))
    assert "| 0: _stat | 180.1 us | 64 register/thread |" in page


@pytest.mark.parametrize(("name", "value"), [("SECTIONS", "env,cheks"), ("DEVICE", "tpu")])
def test_a_mistake_is_one_sentence(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"{name} takes"):
        command.main()


def test_sections_fit_into_ten_minutes():
    measured = sum(seconds for name, seconds in command.SECTIONS.items() if name != "tests")
    assert measured <= 570 - 60, "a minute is left for the tests"
