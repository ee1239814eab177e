"""What recorded faults are prescribed: which changes, and what the replayed log says they would do."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription, Severity
from precdoctor.diagnosis.engine import diagnose_view, resolve_options, view_of
from precdoctor.diagnosis.prescriptions.candidates import candidates
from precdoctor.diagnosis.prescriptions.prescribed import prescribe
from precdoctor.diagnosis.registry import RULES
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.runlog import open_run
from precdoctor.runlog.changes import Change
from tests.support import samples
from tests.support.training import Training


@functools.cache
def prescriptions_of(path: Path):
    view = view_of(open_run(path / "run"))
    return prescribe(view, diagnose_view(view, RULES, resolve_options({})))


def applied(code):
    paths = [path for sample, path in samples.recorded("firing") if sample == code]
    return [p for path in paths for p in prescriptions_of(path) if p.apply and p.code == code]


def test_thrash_a_longer_interval_and_fewer_skips():
    [one, *_] = applied("PD302")
    settings = {c.setting: c.to for c in one.changes}
    assert settings["scaler.growth_interval"] == 2000 and settings["scaler.init_scale"] > 0
    [skipped] = [e for e in one.effects if e.measure.name == "skipped_steps"]
    assert skipped.after < skipped.before


def test_lost_updates_fp32_masters_and_none_lost():
    [one, *_] = applied("PD501")
    assert [c.setting for c in one.changes] == ["optimizer.master_weights"]
    [lost] = one.effects
    assert lost.measure.name == "lost_update_share" and lost.after < 0.01 < lost.before
    assert one.memory_bytes and one.memory_bytes > 0


def test_adam_eps_a_smaller_one_and_whole_steps():
    [one, *_] = applied("PD503")
    [change] = one.changes
    assert change.setting == "optimizer.eps" and change.to < change.before
    [below] = [e for e in one.effects if e.measure.name == "below_eps_share"]
    assert below.after < below.before


def finding(**location) -> Finding:
    place = Location(**{"root": "GPT#0", "phase": Phase.FORWARD, "rank": 0, "step": 1, **location})
    return Finding("PD600", "x", Severity.WARNING, 0.9, "t", "m", place)


@pytest.mark.parametrize(
    ("change", "location", "expected"),
    [
        (
            {"module": "a.b", "dtype": {"from": "float16", "to": "float32"}},
            {"kind": "output"},
            Change("module.dtype", "float32", "float16", "GPT#0", "a.b"),
        ),
        ({"eps": {"from": 1e-4, "to": 1e-9}}, {"phase": Phase.OPTIMIZER}, Change("optimizer.eps", 1e-9, 1e-4)),
        (
            {"module": "", "dtype": {"from": "float16", "to": "float32"}},
            {"kind": "output"},
            Change("module.dtype", "float32", "float16", "GPT#0"),
        ),
        (
            {"weight_dtype": {"from": "bfloat16", "to": "float32"}},
            {},
            Change("optimizer.master_weights", "float32", "bfloat16"),
        ),
    ],
)
def test_what_a_rule_says_becomes_a_change(tmp_path, change, location, expected):
    view = RunView(Training(2).write(tmp_path / "run"))
    [first, *_] = candidates(view, finding(**location), Prescription("t", change, {}, ""))
    assert first.changes == (expected,) and not first.why_not


@pytest.mark.parametrize(
    ("change", "location", "why"),
    [
        ({"eps": {"from": 0.0, "to": 1e-6}}, {}, "edit"),
        ({"loss_scale": {"from": 1.0, "to": 1024.0}}, {}, "GradScaler"),
        ({"autocast_dtype": {"from": "float16", "to": "bfloat16"}}, {}, "autocast"),
        ({"unscale_before_clip": {"from": False, "to": True}}, {}, "order"),
        ({"module": "a", "dtype": {"from": "float16", "to": "float32"}}, {"kind": "input"}, "outside any module"),
        ({"dtype": {"from": "float16", "to": "float32"}}, {"kind": "output"}, "edit"),
        ({"lr": {"from": 1.0, "to": 0.1}}, {}, "edit"),
        ({"module": "a", "dtype": {"from": "float16", "to": "float8"}}, {"kind": "output"}, "edit"),
    ],
)
def test_what_takes_an_edit_says_so(tmp_path, change, location, why):
    view = RunView(Training(2).write(tmp_path / "run"))
    [first, *_] = candidates(view, finding(**location), Prescription("t", change, {}, ""))
    assert first.changes == () and why in first.why_not
