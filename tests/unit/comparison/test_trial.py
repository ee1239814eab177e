"""The interval of a loss gap; predictions of a plan against counts of its casts; the verdict."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest

from precdoctor.comparison.loss_gap import half_width, loss_gap
from precdoctor.comparison.trial import judge_trial, not_applied
from precdoctor.diagnosis.engine import describe, view_of
from precdoctor.diagnosis.offline.whatif.plan_file import Figures, load
from precdoctor.errors import UsageError
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import E4M3FN
from precdoctor.reporting.console import make_console
from precdoctor.reporting.trial_view import document, print_trial, verdict
from precdoctor.runlog import open_run
from tests.support.runs import write_run
from tests.support.schemas import schema
from tests.support.tensors import row_of

# -- the interval -----------------------------------------------------------------------------------------------------


def walk(rng, count, correlation):
    """Values that follow each other with this correlation; standard deviation 1, mean 0."""
    out = [rng.gauss(0.0, 1.0)]
    while len(out) < count:
        out.append(correlation * out[-1] + math.sqrt(1.0 - correlation**2) * rng.gauss(0.0, 1.0))
    return out


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_interval_holds_the_mean_about_as_often_as_it_says(correlation):
    rng = random.Random(0)
    held = sum(abs(float(np.mean(v))) <= half_width(v) for v in (walk(rng, 50, correlation) for _ in range(1000)))
    assert 0.90 <= held / 1000 <= 0.99


def test_correlated_differences_say_less():
    rng = random.Random(1)
    independent, correlated = (np.mean([half_width(walk(rng, 25, r)) for _ in range(200)]) for r in (0.0, 0.8))
    assert correlated > 1.5 * independent
    assert half_width([0.5] * 10) == 0.0


def losses(gap=0.0, scatter=0.0, steps=40, seed=2):
    rng = random.Random(seed)
    return {s: 2.0 + 0.1 * ((s * 7) % 5) + gap + rng.gauss(0.0, scatter) for s in range(steps)}


def test_a_gap_is_that_of_the_last_half_beside_the_scatter_of_the_run():
    before = losses()
    late = {s: v + (0.3 if s >= 20 else 0.0) for s, v in before.items()}
    gap = loss_gap(before, late, 0.01)
    assert (gap.first, gap.last, gap.steps) == (20, 39, 20)
    assert gap.mean == pytest.approx(0.3) and gap.low == pytest.approx(0.3)
    assert gap.noise == pytest.approx(np.std(np.diff(list(before.values())[20:]), ddof=1) / math.sqrt(2.0))
    assert gap.allowed == gap.noise / 2 and gap.holds is False
    assert loss_gap(before, before, 0.5).allowed == pytest.approx(0.5 * gap.level)


@pytest.mark.parametrize(("shift", "scatter", "expected"), [(0.0, 0.01, True), (0.2, 0.01, False), (0.07, 0.2, None)])
def test_a_gap_holds_or_not_or_is_open(shift, scatter, expected):
    assert loss_gap(losses(), losses(shift, scatter), 0.01).holds is expected


def test_losses_that_are_not_finite_and_too_few_make_no_gap():
    before = losses(steps=6)
    assert loss_gap(before, before, 0.01) is None
    assert loss_gap(losses(), dict.fromkeys(range(40), math.nan), 0.01) is None


# -- runs with casts --------------------------------------------------------------------------------------------------

STEPS = 12
GRADIENT = 1e-6 * np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32)

PLAN = """
schema_version = 1
[run]
path = "runs/a"
[plan]
target = { max_flushed = 0.005, max_saturated = 0.0, min_sqnr_db = 20.0 }
[[modules]]
root = "Net#0"
module = "head"
precision = "wide"
[[modules]]
root = "Net#0"
module = "up"
precision = "fp8"
[modules.weight]
format = "E4M3FN"
scaling = "tensor"
flushed = { low = 0.0, high = 0.0, estimate = 0.0 }
saturated = { low = 0.0, high = 0.0, estimate = 0.0 }
sqnr_db = { low = 20.0, high = 60.0, estimate = 31.5 }
[modules.grad_output]
format = "E5M2"
scaling = "tensor"
"""


def plan(folder, text=PLAN):
    (folder / "plan.toml").write_text(text)
    return load(folder / "plan.toml")


def counts(x, scale):
    """What a cast to E4M3 at this scale does, as an event holds it."""
    x = x.astype(np.float64)
    back = cast_array(x * scale, E4M3FN, saturate=True) / scale
    row = [x.size, int((back == 0.0).sum()), 0, float(((back - x) ** 2).sum()), float((x**2).sum())]
    named = zip(("elements", "flushed", "saturated", "noise", "signal"), row, strict=True)
    return {"steps": list(range(STEPS)), **{name: [value] * STEPS for name, value in named}}


def casts(scale):
    shared = {"event": "casts", "root": "Net#0", "module": "up"}
    weight = {"role": "weight", "name": "weight", **counts(WEIGHT, 448.0 / float(np.abs(WEIGHT).max()))}
    gradient = {"role": "grad_output", "name": "", **counts(GRADIENT, scale)}
    return [{**shared, "data": json.dumps(data)} for data in (weight, gradient)]


def applied(done, **data):
    row = {"setting": "module.casts", "to": "weight E4M3FN tensor", "done": done, **data}
    return {"event": "applied", "root": "Net#0", "module": "up", "data": json.dumps(row)}


def run(path, events=(), gap=0.0, fingerprint=1, loss=2.0):
    rows = []
    for step in range(STEPS):
        shared = {"step": step, "module": "up", "module_class": "Linear"}
        for order, (kind, name, x) in enumerate(
            [("input", "", WEIGHT), ("output", "", WEIGHT), ("grad_output", "", GRADIENT), ("weight", "weight", WEIGHT)]
        ):
            print_ = fingerprint if kind == "weight" else order
            row = row_of(x, **shared, kind=kind, name=name, fingerprint=print_)
            rows.append(row | ({} if kind == "weight" else {"order": order}))
        rows.append(row_of(GRADIENT, **shared, kind="weight_grad", name="weight"))
    steps = [{"step": s, "loss": loss + 0.01 * ((s * 7) % 5) + gap} for s in range(STEPS)]
    return view_of(open_run(write_run(path, rows, steps, events)))


def judged(folder, scale, text=PLAN, **other):
    return judge_trial(plan(folder, text), run(folder / "a"), run(folder / "b", casts(scale), **other), 0.01, {})


UNSCALED = PLAN.replace('format = "E5M2"\nscaling = "tensor"', 'format = "E4M3FN"\nscaling = "none"')


def test_casts_that_do_as_predicted_hold(tmp_path):
    scaled = PLAN.replace('"E5M2"', '"E4M3FN"')
    trial = judged(tmp_path, 448.0 / float(np.abs(GRADIENT).max()), scaled)
    assert trial.exit_code == 0 and verdict(trial).startswith("The plan holds for 1 module over 12 steps")
    assert {c.planned.role: c.came_true for c in trial.casts} == {"weight": True, "grad_output": True}
    [weight] = [c for c in trial.casts if c.planned.role == "weight"]
    assert weight.figures == Figures(0.0, 0.0, 31.5)
    assert trial.gradients[0].first == trial.gradients[0].typical == 1.0


def test_an_unscaled_gradient_is_flushed_as_predicted_and_named(tmp_path):
    trial = judged(tmp_path, 1.0, UNSCALED)
    [worst, _] = trial.casts
    assert (worst.planned.role, worst.misses) == ("grad_output", ("flushed", "sqnr"))
    assert worst.predicted.flushed == worst.at_step.flushed == worst.overall.flushed == 1.0 and worst.came_true
    assert trial.exit_code == 1
    assert "`up` grad_output in E4M3FN none: 100 % flushed on step 11 (predicted 100 %)" in verdict(trial)
    assert worst.figures is None, "what the plan said was of another format"


def test_a_cast_that_does_otherwise_is_a_missed_prediction(tmp_path):
    trial = judged(tmp_path, 1.0)  # planned in E5M2 with a scale
    assert [c.came_true for c in trial.casts] == [False, True]


def test_a_loss_gap_and_a_lost_loss_are_reasons(tmp_path):
    scaled, scale = PLAN.replace('"E5M2"', '"E4M3FN"'), 448.0 / float(np.abs(GRADIENT).max())
    for folder, other in (("gap", {"gap": 0.5}), ("nan", {"loss": math.nan})):
        (tmp_path / folder).mkdir()
        trial = judged(tmp_path / folder, scale, scaled, **other)
        assert trial.exit_code == 1, folder
        assert trial.not_finite_at == (0 if folder == "nan" else None)
        assert ("the loss is 0.5 higher" in verdict(trial)) is (folder == "gap")


def test_a_training_that_ends_under_the_plan_alone_is_a_reason(tmp_path):
    views = run(tmp_path / "a"), run(tmp_path / "b", casts(448.0 / float(np.abs(GRADIENT).max())))
    scaled = plan(tmp_path, PLAN.replace('"E5M2"', '"E4M3FN"'))
    trial = judge_trial(scaled, *views, 0.01, {}, "ended with status 1")
    assert trial.exit_code == 1 and verdict(trial) == "The plan does not hold: the training ended with status 1."


def test_runs_that_start_from_other_weights_cannot_be_judged(tmp_path):
    trial = judged(tmp_path, 1.0, UNSCALED, fingerprint=2)
    assert trial.exit_code == 3
    assert verdict(trial).startswith("The plan cannot be judged: the two runs do not start alike (up.weight); seed")


def test_what_was_not_applied_is_one_sentence(tmp_path):
    view = run(tmp_path / "b", [applied(True), applied(False, why="its forward never ran")])
    assert not_applied(view) == "the plan cannot be applied to `up`, because its forward never ran"
    assert not_applied(run(tmp_path / "c", [applied(True)])) is None


def test_the_report_follows_its_schema_and_fits_a_screen(tmp_path, capsys):
    trial = judged(tmp_path, 1.0, UNSCALED)
    view = run(tmp_path / "c")
    report = document(trial, {"original": describe(view), "planned": describe(view)})
    jsonschema.validate(json.loads(json.dumps(report, allow_nan=False)), schema("trial"))
    jsonschema.Draft202012Validator.check_schema(schema("trial"))
    assert report["casts"][0]["seen"]["flushed"] == 1.0 and report["verdict"] == "does-not-hold"
    print_trial(replace(trial, gap=None), "trials/\x1b[31m", make_console(width=80), worst=1)
    out = capsys.readouterr().out
    assert "100 % -> 100 %" in out and "1 more in trial.json" in out and "\x1b[31m" not in out
    assert max(map(len, out.splitlines())) <= 80


# -- the plan's file --------------------------------------------------------------------------------------------------


def test_a_plan_becomes_one_change_per_module(tmp_path):
    found = plan(tmp_path)
    assert [(c.module, c.to) for c in found.changes] == [("up", "weight E4M3FN tensor, grad_output E5M2 tensor")]
    as_json = {
        "schema_version": 1,
        "modules": [{"root": "Net#0", "module": "", "operands": {"input": {"format": "mxfp8"}}}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(as_json))
    [change] = load(tmp_path / "plan.json").changes
    assert (change.root, change.module, change.to) == ("Net#0", "", "input MXFP8_E4M3 floor")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("schema_version = 1", "is not a plan"),
        ("x = ", "cannot be read"),
        (PLAN.replace('"fp8"', '"wide"'), "keeps every module wide"),
        (PLAN.replace('"head"', '"up"').replace('"wide"', '"fp8"'), "up has no operand to cast"),
        (PLAN.replace('"E5M2"', '"E6M1"'), "up grad_output: no number format is called"),
        (PLAN.replace('"E5M2"', '"int8"'), "up grad_output: INT8 cannot be applied"),
        (PLAN.replace('"E5M2"\nscaling = "tensor"', '"E5M2"\nscaling = "fixed"\nscale = -1'), "a scale is a finite"),
        (PLAN.replace('"tensor"', '"channel"'), "not by 'channel'"),
        (PLAN.replace("max_flushed = 0.005", 'max_flushed = "x"'), "max_flushed of the target is a number"),
        (PLAN + PLAN.partition("[[modules]]\n")[2].partition("[[modules]]")[2].join(["[[modules]]", ""]), "twice"),
    ],
)
def test_another_plan_is_refused_in_one_sentence(tmp_path, text, reason):
    with pytest.raises(UsageError, match=reason) as refused:
        plan(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_a_plan_that_is_not_there_says_how_to_write_one(tmp_path):
    with pytest.raises(UsageError, match="precdoctor whatif RUN --plan -o"):
        load(tmp_path / "nothing.toml")
