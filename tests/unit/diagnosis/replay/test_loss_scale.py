"""Replayed loss scaling against a real GradScaler fed with the same gradients."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from precdoctor.diagnosis.offline.replay.fp8 import replay_recipes
from precdoctor.diagnosis.offline.replay.gradients import run_gradients
from precdoctor.diagnosis.offline.replay.loss_scale import replay_loss_scale, used_policy
from precdoctor.diagnosis.offline.replay.updates import recorded_policy, updates_of
from precdoctor.diagnosis.survey.view import Process, RunView
from precdoctor.errors import CorruptRunError, NothingRecordedError, UsageError
from precdoctor.numerics.formats import BF16, FP16
from precdoctor.numerics.fp8_scaling import CurrentScaling, DelayedScaling
from precdoctor.numerics.loss_scaling import ScalerPolicy
from precdoctor.runlog import open_run
from tests.support.runs import write_run
from tests.support.samples import RULES_DIRECTORY
from tests.support.scaled import ROOT, Scaled, course, hold, overflows
from tests.support.training import histogram

P0 = Process(0, 0)
RECORDED = [RULES_DIRECTORY / "PD301" / "healthy" / "fresh-scaler", RULES_DIRECTORY / "PD301/firing/gan-auxiliary-loss"]


def walk(steps: int, seed: int, *, start: float = 2.0**-6, restless: float = 0.5, layers: int = 3):
    """Gradients whose size wanders by binades."""
    rng = np.random.default_rng(seed)
    size = np.exp2(np.cumsum(rng.normal(0.0, restless, steps))) * start
    shape = rng.uniform(-6, 0, layers)
    return [[rng.standard_normal(64) * s * 2.0**k for k in shape] for s in size]


def view_of(run: Scaled, path: Path, **options) -> RunView:
    return RunView(run.write(path, **options))


@pytest.mark.parametrize("sample", RECORDED, ids=[s.name for s in RECORDED])
def test_the_policy_of_a_recorded_run_gives_its_own_trajectory(sample):
    view = RunView(open_run(sample / "run"))
    replayed = replay_loss_scale(view, used_policy(view))
    recorded = updates_of(view, P0)
    assert [(s.scale, s.growth_tracker) for s in replayed.replay.steps] == [
        (u.scale, u.growth_tracker) for u in recorded
    ]  # fmt: skip
    assert replayed.replay.overflow_steps == replayed.recorded_overflows
    assert len(replayed.recorded_overflows) > 3 and replayed.replay.uncertain_steps == 0
    every_attempt = view.steps[["step", "loss_scale"]].to_numpy().tolist()
    scales = {s: u.scale for u in recorded for s in range(u.step, u.last + 1)}
    assert every_attempt == [[s, scales[s]] for s, _ in every_attempt]


options = st.fixed_dictionaries(
    {
        "init_scale": st.sampled_from([2.0**k for k in range(4, 30, 3)]),
        "growth_interval": st.integers(1, 12),
        "growth_factor": st.sampled_from([2.0, 2.0, 1.5]),
        "backoff_factor": st.sampled_from([0.5, 0.5, 0.25]),
    }
)


@given(seed=st.integers(0, 2**32 - 1), used=options, other=options, every=st.sampled_from([1, 1, 4]),
       seen_from=st.sampled_from([0, 0, 1]))  # fmt: skip
@example(  # an amax that FP16 rounded up at a scale of 1.5 times a power of two
    seed=100943, used={"init_scale": 16.0, "growth_interval": 3, "growth_factor": 1.5, "backoff_factor": 0.5},
    other={"init_scale": 16.0, "growth_interval": 1, "growth_factor": 2.0, "backoff_factor": 0.5}, every=1, seen_from=0,
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_what_is_certain_is_true(seed, used, other, every, seen_from):
    gradients = walk(40, seed)
    run = Scaled(gradients, used, every, seen_from)
    policy = ScalerPolicy(
        init=other["init_scale"], growth=other["growth_factor"], backoff=other["backoff_factor"],
        interval=other["growth_interval"],
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        view = view_of(run, Path(folder) / "run")
        same = replay_loss_scale(view, used_policy(view))
        answer = replay_loss_scale(view, policy)
    assert [(s.scale, s.growth_tracker, s.overflow) for s in same.replay.steps] == run.course
    for step, layers, ideal in zip(answer.replay.steps, gradients, answer.ideal, strict=True):
        if step.certain:
            assert step.overflow is overflows(layers, step.scale)
        true = max((2.0**k for k in range(-40, 60) if not overflows(layers, 2.0**k)), default=0.0)
        assert ideal.low <= true <= ideal.high


def test_where_everything_is_sampled_another_policy_is_replayed_exactly(tmp_path):
    gradients = walk(300, 3, restless=0.2)
    run = Scaled(gradients, {"init_scale": 2.0**10, "growth_interval": 2000})
    policy = ScalerPolicy(init=2.0**20, interval=20)
    answer = replay_loss_scale(view_of(run, tmp_path / "run"), policy)
    truth = course(gradients, {"init_scale": 2.0**20, "growth_interval": 20})
    assert [(s.scale, s.growth_tracker, s.overflow) for s in answer.replay.steps] == truth
    assert answer.overflows > 5


def test_between_samples_the_norm_stands_in_and_it_is_said(tmp_path):
    gradients = walk(300, 3, restless=0.2)
    run = Scaled(gradients, {"init_scale": 2.0**10, "growth_interval": 2000}, every=8)
    answer = replay_loss_scale(view_of(run, tmp_path / "run"), ScalerPolicy(init=2.0**20, interval=20))
    assert (len(answer.run.updates), answer.run.sampled, answer.run.bounded) == (300, 38, 262)
    assert any("262 of 300 steps were not sampled" in note for note in answer.notes)
    truth = course(gradients, {"init_scale": 2.0**20, "growth_interval": 20})
    wrong = sum(s.overflow is not overflows(x, s.scale) for s, x in zip(answer.replay.steps, gradients, strict=True))
    assert wrong <= 15  # of 300: near the limit, where a norm cannot tell
    assert math.isclose(answer.overflows, sum(t[2] for t in truth), rel_tol=0.4)
    assert answer.replay.uncertain_steps > 100


def test_flushed_contains_what_real_casts_flush(tmp_path):
    gradients = walk(60, 5, start=2.0**-22, restless=0.1)
    run = Scaled(gradients, {"init_scale": 4.0})
    view = view_of(run, tmp_path / "run")
    for scale in (0.25, 1.0, 4.0, 64.0, 2.0**14):
        found = replay_loss_scale(view, ScalerPolicy.static(scale)).replay.flushed
        true = np.mean([np.mean(hold(np.concatenate(x), scale) == 0) for x in gradients])
        assert found.low - 1e-12 <= true <= found.high + 1e-12
        assert found.estimate == pytest.approx(true, rel=0.35, abs=0.02)


def test_the_best_policy_beats_the_stock_one_on_shrinking_gradients(tmp_path):
    gradients = [[np.random.default_rng(s).standard_normal(256) * 2.0 ** (-22 - s / 10)] for s in range(60)]
    view = view_of(Scaled(gradients, {"init_scale": 1024.0}), tmp_path / "run")
    best, stock = replay_loss_scale(view), replay_loss_scale(view, ScalerPolicy())
    assert best.replay.lost <= stock.replay.lost + 1e-4
    assert best.replay.policy.init >= 2.0**12 and best.overflows == 0
    assert best.scores[0].policy == best.replay.policy
    assert best.recorded_flushed is not None and best.recorded_flushed.estimate > 1e-4


# -- culprits ---------------------------------------------------------------------------------------------------------


def spiking(every: int = 1) -> Scaled:
    """Layer 1 is always the largest; at step 5 it overflows."""
    rng = np.random.default_rng(0)
    sizes = [[1.0, 16.0 * (64.0 if s == 5 else 1.0), 2.0] for s in range(12)]
    gradients = [[rng.uniform(0.5, 1.0, 32) * k for k in layer] for layer in sizes]
    return Scaled(gradients, {"init_scale": 2.0**10}, every)


def test_a_recorded_overflow_names_the_first_bad_tensor(tmp_path):
    view = view_of(spiking(), tmp_path / "run")
    [culprit] = replay_loss_scale(view, used_policy(view)).culprits
    assert (culprit.step, culprit.module, culprit.kind, culprit.how) == (5, "layers.1", "grad_output", "recorded")
    assert (culprit.root, culprit.scale, culprit.forward) == (ROOT, 2.0**10, False)


def test_a_predicted_overflow_names_the_tensor_that_leaves_the_format(tmp_path):
    answer = replay_loss_scale(view_of(spiking(), tmp_path / "run"), ScalerPolicy(init=2.0**13))
    first = answer.culprits[0]
    assert (first.step, first.module, first.how) == (0, "layers.1", "predicted")
    assert -1.0 < first.headroom_binades < 0.0
    assert all(c.module == "layers.1" for c in answer.culprits)


def test_between_samples_the_nearest_sample_is_asked(tmp_path):
    view = view_of(spiking(every=4), tmp_path / "run")
    [culprit] = replay_loss_scale(view, used_policy(view)).culprits
    assert (culprit.step, culprit.module, culprit.how) == (5, "layers.1", "nearest sample")
    assert culprit.headroom_binades > 0.0  # one step before the spike


def test_an_overflow_of_the_forward_pass_is_told_apart(tmp_path):
    run = spiking()
    forward = {"step": 5, "root": ROOT, "module": "layers.0", "kind": "output", "dtype": "float16", "pos_inf": 3,
               "numel": 8, "order": -1, "first_bad_order": -1}  # fmt: skip
    path = write_run(tmp_path / "run", [*run.rows(), forward], run.step_rows(), facts=run.facts)
    [culprit] = replay_loss_scale(RunView(open_run(path)), ScalerPolicy(init=2.0**10)).culprits
    assert (culprit.module, culprit.kind, culprit.forward) == ("layers.0", "output", True)


def test_a_loss_that_is_not_finite_overflows_at_any_scale(tmp_path):
    run = spiking()
    steps = run.step_rows()
    steps[5]["loss"] = math.nan
    path = write_run(tmp_path / "run", run.rows(), steps, facts=run.facts)
    answer = replay_loss_scale(RunView(open_run(path)), ScalerPolicy.static(1.0))
    assert answer.replay.overflow_steps == (5,) and answer.ideal[5].high == 0.0


# -- what a log may lack ----------------------------------------------------------------------------------------------


def test_a_wide_run_is_asked_what_fp16_would_have_done(tmp_path):
    gradients = walk(30, 9, start=1.0)
    rows = [
        {"step": s, "root": ROOT, "module": f"layers.{i}", "kind": "grad_output", "dtype": "bfloat16", **histogram(x)}
        for s, layers in enumerate(gradients)
        for i, x in enumerate(layers)
    ]
    steps = [{"step": s, "loss": 1.0, "non_finite": 0} for s in range(30)]
    view = RunView(open_run(write_run(tmp_path / "run", rows, steps)))
    answer = replay_loss_scale(view, ScalerPolicy(interval=5))
    assert answer.run.hypothetical and "No recorded gradient is in FP16" in answer.notes[0]
    truth = course(gradients, {"growth_interval": 5})
    assert [(s.scale, s.growth_tracker, s.overflow) for s in answer.replay.steps] == truth
    assert answer.replay.uncertain_steps == 0
    clean = [(np.concatenate(x), scale) for x, (scale, _, bad) in zip(gradients, truth, strict=True) if not bad]
    true = np.mean([np.mean(hold(x, scale) == 0) for x, scale in clean])
    assert answer.replay.flushed.low - 1e-12 <= true <= answer.replay.flushed.high + 1e-12
    with pytest.raises(UsageError, match="names no GradScaler"):
        used_policy(view)


def test_other_ranks_gradients_count(tmp_path):
    small, large = ([[np.full(8, size)] for _ in range(4)] for size in (1.0, 32.0))
    rows = []
    for rank, gradients in enumerate((small, large)):
        rows += [{**r, "rank": rank} for r in Scaled(gradients, {"init_scale": 64.0}).rows()]
    steps = [{**r, "rank": rank} for rank in (0, 1) for r in Scaled(small, {"init_scale": 64.0}).step_rows()]
    view = RunView(open_run(write_run(tmp_path / "run", rows, steps, ranks=2)))
    answer = replay_loss_scale(view, ScalerPolicy.static(2.0**12))
    assert answer.overflows == 4  # 32 * 2**12 is beyond FP16, 2**12 is not
    assert any("all ranks" in note for note in answer.notes)


def test_a_resumed_run_begins_where_it_was(tmp_path):
    run = spiking()
    for row in run.course:
        assert row[0] in (2.0**10, 2.0**9)
    facts = {"scalers": [{**run.facts["scalers"][0], "init_scale": 65536.0}]}
    path = write_run(tmp_path / "run", run.rows(), run.step_rows(), facts=facts)
    view = RunView(open_run(path))
    answer = replay_loss_scale(view, used_policy(view))
    assert [s.scale for s in answer.replay.steps] == list(answer.recorded_scales)


def test_dropped_rows_are_said(tmp_path):
    run = spiking()
    drop = {"event": "drop", "data": '{"reason": "queue full", "rows": 12}'}
    path = write_run(tmp_path / "run", run.rows(), run.step_rows(), [drop], facts=run.facts)
    assert any("12 rows were dropped" in n for n in replay_loss_scale(RunView(open_run(path)), ScalerPolicy()).notes)


def test_steps_without_gradient_rows_rest_on_their_norms(tmp_path):
    run = spiking()
    view = RunView(open_run(write_run(tmp_path / "run", [], run.step_rows(), facts=run.facts)))
    answer = replay_loss_scale(view, ScalerPolicy.static(2.0**30))
    assert answer.run.sampled == 0 and answer.replay.flushed is None
    assert answer.overflows == 12  # no norm of these fits FP16 times 2**30


def test_nothing_recorded_is_said(tmp_path):
    with pytest.raises(NothingRecordedError, match="no complete training step"):
        replay_loss_scale(RunView(open_run(write_run(tmp_path / "run"))), ScalerPolicy())


def test_hostile_facts_make_no_policy(tmp_path):
    for i, wrong in enumerate(
        ({"growth_interval": 1e300}, {"backoff_factor": -1}, {"init_scale": "NaN"}, {"enabled": False})
    ):
        run = spiking()
        facts = {"scalers": [{**run.facts["scalers"][0], **wrong}]}
        view = RunView(open_run(write_run(tmp_path / f"run{i}", [], run.step_rows(), facts=facts)))
        assert recorded_policy(view, P0) is None or wrong.get("growth_interval")


def test_memory_of_exponents_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("precdoctor.diagnosis.offline.replay.gradients.HISTOGRAMS", 8)
    view = view_of(Scaled(walk(50, 1), {"init_scale": 4.0}), tmp_path / "run")
    found = run_gradients(view, P0, FP16)
    assert sum(g.histogram is not None for g in found.gradients) <= 8
    assert found.sampled == 50 and all(g.limit.overflows_from < math.inf for g in found.gradients)


def test_another_format_can_be_asked_about(tmp_path):
    view = view_of(Scaled(walk(10, 1), {"init_scale": 4.0}), tmp_path / "run")
    answer = replay_loss_scale(view, ScalerPolicy(), fmt=BF16)
    assert answer.run.hypothetical and answer.overflows == 0 and answer.run.format is BF16


def test_a_scale_that_collapsed_to_zero(tmp_path):
    gradients = [[np.full(8, 1.0 if s < 5 else np.inf)] for s in range(40)]
    run = Scaled(gradients, {"init_scale": 2.0**-140})
    assert run.course[-1][0] == 0.0
    view = view_of(run, tmp_path / "run")
    answer = replay_loss_scale(view, used_policy(view))
    assert [(s.scale, s.growth_tracker, s.overflow) for s in answer.replay.steps] == run.course
    assert replay_loss_scale(view).overflows == 35  # no scale mends an Inf


HOSTILE = [{"exp_lo": -(2**31), "exp_hist": [1, 2]}, {"exp_lo": 2**30, "exp_hist": [1]},
           {"exp_hist": [-5], "exp_lo": 0},
           {"amax": -1.0}, {"amax": math.inf}, {"scale": -4.0}, {"scale": math.nan}, {"numel": -(2**60)},
           {"zero": -7}, {"exp_lo": None}, {"amax": None, "exp_hist": None}]  # fmt: skip


@pytest.mark.parametrize("wrong", HOSTILE, ids=str)
def test_rows_that_cannot_be_true(wrong, tmp_path):
    run = spiking()
    rows = [row | (wrong if row["step"] == 2 else {}) for row in run.rows()]
    view = RunView(open_run(write_run(tmp_path / "run", rows, run.step_rows(), facts=run.facts)))
    for ask in (lambda: replay_loss_scale(view), lambda: replay_recipes(view, [CurrentScaling(), DelayedScaling(2)])):
        try:
            assert ask()
        except CorruptRunError as error:
            assert any(f"column {name!r} holds" in str(error) for name in wrong) or "exp_hist" in wrong


@pytest.mark.parametrize(
    "wrong",
    [{"loss_scale": -1.0}, {"loss_scale": math.inf}, {"grad_norm": -1.0}, {"growth_tracker": -5}, {"loss": math.inf}],
)
def test_steps_that_cannot_be_true(wrong, tmp_path):
    run = spiking(every=4)
    steps = [row | (wrong if row["step"] == 2 else {}) for row in run.step_rows()]
    view = RunView(open_run(write_run(tmp_path / "run", run.rows(), steps, facts=run.facts)))
    assert len(replay_loss_scale(view).replay.steps) == 12
