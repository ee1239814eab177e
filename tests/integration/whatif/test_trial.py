"""``precdoctor trial``: a plan made by ``whatif --plan``, tried with real children."""

from __future__ import annotations

import json
import re

import pytest

import precdoctor
from tests.support.processes import PYTHON, ROOT, environment, finish, script, start, warm

STEPS = 12

#: Gradients of some 1e-5: an unscaled E4M3 flushes them all.
SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(64, 16)
    loss = 0.1 * (model(x) - x[:, :4].sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("made step", step, flush=True)
"""


def command(folder, *arguments):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from precdoctor.cli import main; sys.exit(main())"
    return finish(start(folder, [PYTHON, "-c", code, *arguments], environment()), folder / "run")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recorded run and its plan; 40 dB is more than 8 bits reach, so that it is one of BF16."""
    folder = tmp_path_factory.mktemp("trial")
    path = script(folder, "train.py", SCRIPT)
    done = command(folder, "record", "--every", "1", "-o", "run", "--", *warm(path))
    assert done.status == 0, done.err
    done = command(folder, "whatif", "run", "--plan", "--min-sqnr", "40", "-o", "plan.toml")
    assert done.status == 0, done.err
    return folder


def trial(place, plan, name, *more, file="train.py"):
    (place / f"{name}.toml").write_text(plan)
    arguments = [f"{name}.toml", "--steps", str(STEPS), "-o", name, *more, "--", *warm(place / file)]
    return command(place, "trial", *arguments)


def test_a_plan_of_bf16_holds_and_both_runs_end_in_order(place):
    done = trial(place, (place / "plan.toml").read_text(), "good")
    assert done.status == 0, done.err
    out = done.out.decode()
    assert "The plan holds for 2 modules over 12 steps" in out
    assert "made step" not in out and done.err.count(f"made step {STEPS - 2}") == 2
    report = json.loads((place / "good" / "trial.json").read_text())
    assert len(report["casts"]) == 6
    assert all(c["format"] == "BF16" and c["came_true"] and not c["misses"] for c in report["casts"])
    for name, neutral in (("original", True), ("planned", False)):
        run = precdoctor.open_run(place / "good" / name)
        steps = run.steps()
        assert list(steps["step"]) == list(range(STEPS)) and steps["complete"].all()
        assert run.info["exit_status"] == 66 and run.info["bit_neutral"] is neutral
    assert precdoctor.compare(place / "good" / "original", place / "good" / "planned").applied.done


def test_a_format_that_does_not_hold_is_named_and_flushes_as_predicted(place):
    plan = (place / "plan.toml").read_text()
    table = r'(module = "2"\n(?:.*\n)*?\[modules\.grad_output\]\n.*\n)format = "BF16"'
    bad = re.sub(table, r'\1format = "E4M3FN"', plan, count=1)
    assert bad != plan
    done = trial(place, bad, "bad", "--output-format", "json")
    assert done.status == 1, done.err
    report = json.loads(done.out)
    worst = report["casts"][0]
    assert (worst["module"], worst["role"], worst["format"]) == ("2", "grad_output", "E4M3FN")
    assert worst["seen"]["flushed"] > 0.9 and worst["came_true"]
    assert report["sentence"].startswith("The plan does not hold: `2` grad_output in E4M3FN none: ")
    assert worst["planned"] is None and report["casts"][1]["planned"] is not None


@pytest.mark.slow
def test_what_cannot_be_done_is_refused_in_one_sentence_after_one_run(place):
    plan = (place / "plan.toml").read_text()
    compiled = SCRIPT.replace("optimizer =", 'model = torch.compile(model, backend="eager")\noptimizer =')
    script(place, "compiled.py", compiled)
    refused = {
        "other": trial(place, plan.replace('module = "2"', 'module = "layers.2"'), "other"),
        "compiled": trial(place, plan, "compiled", file="compiled.py"),
    }
    said = {name: done.err.splitlines()[-1] for name, done in refused.items()}
    assert "`layers.2`, because the training has no module of this name" in said["other"]
    assert "(and 1 more), because its forward never ran, or only inside torch.compile" in said["compiled"]
    for name, done in refused.items():
        assert done.status == 2 and not done.out
        assert (place / name / "planned").is_dir() and not (place / name / "original").exists()


def test_a_trial_is_not_written_over(place):
    (place / "taken").mkdir()
    (place / "taken" / "file").touch()
    done = trial(place, (place / "plan.toml").read_text(), "taken")
    assert done.status == 2 and "taken is already there" in done.err and not done.out
