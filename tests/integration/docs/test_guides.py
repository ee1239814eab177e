"""The guides do what they say: scripts are saved, commands typed, and every line of output they quote is printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from precdoctor.diagnosis import registry
from precdoctor.diagnosis.families import growth
from tests.support import new_rule
from tests.support.blocks import blocks
from tests.support.processes import AS_ANYWHERE, PATIENCE, ROOT, environment
from tests.support.runs import write_run

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
WITH_COMMANDS = [page for page in GUIDES if any(b.language == "bash" for b in blocks(page))]


def words(text):
    """Output as one line: terminals break lines where they like."""
    return " ".join(text.split())


@pytest.fixture
def type_it(tmp_path):
    """Runs commands as a shell of a machine with precdoctor would."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("python", ""), ("precdoctor", "-m precdoctor")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (programs / name).chmod(0o755)
    env = environment(PYTHONPATH=str(ROOT), **AS_ANYWHERE)
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}"

    def run(commands):
        done = subprocess.run(
            ["/bin/sh", "-e", "-c", commands], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_the_guides_are_those():
    assert {page.stem for page in WITH_COMMANDS} == {
        "loss-is-nan", "loss-scale-falls", "does-not-learn", "moving-to-fp8", "is-it-precision",
    }  # fmt: skip


#: It runs with every `make test`; the others record for longer and are left to `make slow`.
QUICK = "loss-is-nan"


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, id=p.stem, marks=() if p.stem == QUICK else pytest.mark.slow) for p in WITH_COMMANDS],
)
def test_a_guide_runs_and_prints_what_it_quotes(page, tmp_path, type_it):
    said, quoted = "", 0
    for block in blocks(page):
        if block.language == "python":
            (tmp_path / block.title).write_text(block.code)
        elif block.language == "bash":
            said = words(type_it(block.code))
        else:
            assert block.language == "text"
            for line in block.code.splitlines():
                assert words(line) in said, f"{page.name} quotes {line!r}, printed was: {said}"
                quoted += 1
    assert quoted >= 2


def example(page, title):
    (code,) = [b.code for b in blocks(ROOT / "docs" / page) if b.title == title]
    return code


@pytest.fixture
def run_a(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = [
        {"step": s, "module": m, "kind": k, "dtype": "float16", "numel": 4, "amax": 2.0 ** (s + 1), "sum_sq": 4.0**s,
         "exp_lo": -1, "exp_hist": [1, 0, 2], "nan": int(s == 3), "scale": 2.0}
        for s in range(5) for m in ("a", "b") for k in ("output", "grad_output")
    ]  # fmt: skip
    steps = [{"step": s, "lr": 0.0 if s else 0.1, "skipped": s == 2, "loss_scale": 1024.0} for s in range(20)]
    write_run(tmp_path / "runs" / "a", tensors, steps)


def test_the_pandas_recipes(run_a):
    found = {}
    exec(example("querying.md", "pandas"), found)
    assert found["first"].to_dict("index")["a", "output"] == {"min": 3, "count": 1}
    assert found["by_step"]["b"].tolist() == [(4.0**s / 4) ** 0.5 / 2.0 for s in range(5)]
    assert found["skipped"]["step"].tolist() == [2]


def test_the_sql_recipes(run_a):
    pytest.importorskip("duckdb")
    found = {}
    exec(example("querying.md", "duckdb"), found)
    assert found["tightest"]["headroom"].tolist() == pytest.approx([10.999295] * 4, abs=1e-4)
    assert set(found["tightest"]["step"]) == {4}
    assert found["histogram"][["exponent", "elements"]].to_numpy().tolist() == [[-1, 10], [0, 0], [1, 20]]


def test_the_tutorial_shows_the_files_of_its_rule():
    for title, path in new_rule.TEMPLATES.items():
        assert example("add-a-rule.md", title) == path.read_text()


def test_the_rule_of_the_tutorial_fires(run_a, capsys):
    exec(example("add-a-rule.md", "try"), {})
    assert capsys.readouterr().out.startswith("the learning rate has decayed to 0: the last 19 of 20 steps")


def test_a_new_rule_is_a_rule_of_its_family(tmp_path, monkeypatch):
    """What `make new-rule` writes imports, and the registry finds it in its family."""
    made = new_rule.write("PD612", "loss-at-rest", tmp_path)
    assert [p.name for p in made] == ["loss_at_rest.py", "samples.py", "train.py", "expected.json", "train.py"]
    monkeypatch.setattr(growth, "__path__", [*growth.__path__, str(made[0].parent)])
    found = {rule.code: rule.name for rule in registry.rules_of(growth)}
    assert found == {**{rule.code: rule.name for rule in dict(registry.FAMILIES)["Growth"]}, "PD612": "loss-at-rest"}
    with pytest.raises(SystemExit, match="exists already"):
        new_rule.write("PD612", "loss-at-rest", tmp_path)
    for code, name in (("PD9", "a-b"), ("PD511", "Name")):
        with pytest.raises(SystemExit, match="got"):
            new_rule.write(code, name, tmp_path)
