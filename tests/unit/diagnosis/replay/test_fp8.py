"""Replayed FP8 recipes against real casts of the arrays the log was made from, and what logs look like in practice."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from precdoctor.diagnosis.offline.replay.blocks import replay_blocks
from precdoctor.diagnosis.offline.replay.fp8 import CANDIDATES, best_delayed, replay_recipes
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import NothingRecordedError, UsageError
from precdoctor.numerics.blocks import MXFP8_E4M3, NVFP4, TILE_128X128
from precdoctor.numerics.formats import E4M3FN, E5M2
from precdoctor.numerics.fp8_scaling import Amax, AmaxSeries, CurrentScaling, DelayedScaling, scale_series
from precdoctor.runlog import open_run
from tests.support.references import blocks_of, cast_blocks
from tests.support.runs import write_run
from tests.support.training import histogram

ROOT = "Net#0"
DTYPES = {"E4M3FN": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
STEPS = 24


def arrays(seed=0, steps=STEPS):
    """Per tensor (module, kind, name) its value at every step; sizes wander, one spikes, one is zero for a while."""
    rng = np.random.default_rng(seed)
    out = {}
    for place in (("a", "output", ""), ("a", "grad_output", ""), ("b", "output", ""), ("b", "weight", "weight")):
        size = np.exp2(np.cumsum(rng.normal(0, 0.4, steps)))
        out[place] = [(rng.standard_normal((4, 64)) * s).astype(np.float32).astype(np.float64) for s in size]
    out["a", "output", ""][10] *= 64.0
    out["b", "output", ""][5] *= 0.0
    return out


def rows_of(run, *, every=1, **more):
    return [
        {"step": s, "root": ROOT, "module": module, "kind": kind, "name": name, **histogram(x), **more}
        for (module, kind, name), values in run.items()
        for s, x in enumerate(values)
        if s % every == 0
    ]  # fmt: skip


def view_of(path, rows, **options):
    steps = [{"step": s, "loss": 1.0} for s in range(STEPS)]
    return RunView(open_run(write_run(path, rows, steps, **options)))


def one(replays, module, kind):
    return next(t for t in replays.tensors if (t.module, t.kind) == (module, kind))


RECIPES = (CurrentScaling(), DelayedScaling(4), DelayedScaling(16, Amax.MAX, 1), DelayedScaling(1, Amax.MOST_RECENT))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_real_casts_lie_inside_the_replay(recipe, tmp_path):
    run = arrays()
    [replay] = replay_recipes(view_of(tmp_path / "run", rows_of(run), batch_rows=7), [recipe])
    assert len(replay.tensors) == 4 and replay.recipe == str(recipe)
    for (module, kind, _), values in run.items():
        found = one(replay, module, kind)
        fmt = E5M2 if kind == "grad_output" else E4M3FN
        assert found.format == fmt.name and found.steps == STEPS
        scales = scale_series(AmaxSeries.of([np.abs(x).max() for x in values]), fmt, recipe)
        flushed = saturated = stale = total = 0
        for x, scale, cold in zip(values, scales.scale, scales.cold, strict=True):
            if cold:
                continue
            product = np.abs(x[x != 0] * scale).astype(np.float32)
            cast = product.astype(DTYPES[fmt.name]).astype(np.float64)
            beyond = int((~np.isfinite(cast)).sum())
            flushed, saturated, stale = flushed + int((cast == 0).sum()), saturated + beyond, stale + (beyond > 0)
            total += product.size
        assert found.flushed.low - 1e-12 <= flushed / total <= found.flushed.high + 1e-12
        assert found.saturated.low - 1e-12 <= saturated / total <= found.saturated.high + 1e-12
        assert found.stale_steps == stale
        assert found.cold_steps == int(scales.cold.sum())
    assert replay.stale_tensors == sum(t.stale_steps > 0 for t in replay.tensors)


def test_a_spike_makes_the_scale_stale_and_then_pads_it(tmp_path):
    run = {("a", "output", ""): [np.full((2, 8), 64.0 if s == 10 else 1.0) for s in range(STEPS)]}
    view = view_of(tmp_path / "run", rows_of(run))
    short, long, current = replay_recipes(view, [DelayedScaling(1), DelayedScaling(1024), CurrentScaling()])
    worst = one(short, "a", "output").worst
    assert (worst.step, worst.amax, worst.scale, worst.binades) == (10, 64.0, 448.0, pytest.approx(6.0))
    assert one(short, "a", "output").stale_steps == one(long, "a", "output").stale_steps == 1
    assert one(long, "a", "output").padding_binades == pytest.approx(6.0)  # 13 of 23 steps remember the spike
    assert one(short, "a", "output").padding_binades == 0.0
    at = [(s.step, s.stale_tensors, s.saturated.estimate) for s in short.steps]
    assert at == [(s, int(s == 10), float(s == 10)) for s in range(STEPS)]
    assert current.stale_tensors == 0 and current.saturated.high == 0.0
    assert best_delayed([short, long]) is short


def test_calls_and_ranks_of_a_tensor_share_a_scale(tmp_path):
    rows = []
    for rank, call, size in ((0, 0, 1.0), (0, 1, 4.0), (1, 0, 8.0)):
        run = {("a", "output", ""): [np.full((2, 8), size)] * 6}
        rows += rows_of(run, rank=rank, call=call)
    [replay] = replay_recipes(view_of(tmp_path / "run", rows, ranks=2), [CurrentScaling()])
    [tensor] = replay.tensors
    assert tensor.steps == 6 and tensor.padding_binades == 0.0 and tensor.saturated.high == 0.0


def test_between_samples_an_older_amax_stands_in_and_is_counted(tmp_path):
    view = view_of(tmp_path / "run", rows_of(arrays(), every=8))
    few, many = replay_recipes(view, [DelayedScaling(4), DelayedScaling(64)])
    assert {t.sparse_steps for t in few.tensors} == {2} and {t.sparse_steps for t in many.tensors} == {0}
    assert all(t.steps == 3 for t in few.tensors)


def test_states_of_a_history_are_told(tmp_path):
    good = np.full((2, 8), 2.0)
    run = {("a", "output", ""): [good, good * 0, np.where(np.arange(16).reshape(2, 8) == 3, np.nan, good), good, good]}
    masked = {("m", "output", ""): [np.where(np.arange(16).reshape(2, 8) == 3, -np.inf, good)] * 5}
    view = view_of(tmp_path / "run", rows_of(run) + rows_of(masked))
    [replay] = replay_recipes(view, [DelayedScaling(1)])
    tensor = one(replay, "a", "output")
    assert (tensor.cold_steps, tensor.kept_steps, tensor.non_finite_steps) == (1, 2, 1)
    assert tensor.saturated.high == 0.0  # the scale was kept, not made infinite
    assert one(replay, "m", "output").non_finite_steps == 0  # a mask is no accident


def test_only_what_is_asked_for(tmp_path):
    facts = {"roots": [{"name": ROOT, "parameters": [{"module": "b", "name": "bias", "shape": [8]}]}]}
    more = {("b", "weight", "bias"): [np.ones(8)] * 3, ("b", "update", "weight"): [np.ones(8)]}
    view = view_of(tmp_path / "run", rows_of(arrays()) + rows_of(more), facts=facts)

    def names(**options):
        [replay] = replay_recipes(view, [CurrentScaling()], **options)
        return {(t.module, t.kind, t.name) for t in replay.tensors}

    assert names() == set(arrays())  # no bias: it is no operand
    assert names(kinds=("weight",)) == {("b", "weight", "weight")}
    assert names(wanted=lambda module: module == "a") == {("a", "output", ""), ("a", "grad_output", "")}
    [late] = replay_recipes(view, [DelayedScaling(4)], steps=(20, 22), format_of=lambda kind: E4M3FN)
    assert {(t.steps, t.cold_steps, t.format) for t in late.tensors} == {(2, 0, "E4M3FN")}
    assert [s.step for s in late.steps] == [20, 21]
    with pytest.raises(NothingRecordedError, match="fp8_operand"):
        replay_recipes(view, [CurrentScaling()], kinds=("fp8_operand",))


def test_the_best_history_and_margin(tmp_path):
    rng = np.random.default_rng(2)
    sizes = np.where(np.arange(STEPS) % 3 == 0, 2.9, 1.0)  # every third step is three times as large
    run = {("a", "output", ""): [rng.uniform(-1, 1, (4, 64)) * s for s in sizes]}
    view = view_of(tmp_path / "run", rows_of(run))
    replays = replay_recipes(view, CANDIDATES)
    best = best_delayed(replays)
    assert best.recipe in ("delayed:1:recent:2", "delayed:16:max") or best.recipe.startswith("delayed:16:max:1")
    assert best.saturated.estimate == min(r.saturated.estimate for r in replays if r.recipe.startswith("delayed"))
    assert replays[0].saturated.high == 0.0


def test_step_numbers_of_any_size(tmp_path):
    run = {("a", "output", ""): [np.full(4, 1.0)] * 3, ("b", "output", ""): [np.full(4, 2.0)] * 3}
    rows = [row | {"step": [0, 2**40, 2**62][row["step"]]} for row in rows_of(run)]
    [replay] = replay_recipes(view_of(tmp_path / "run", rows), [DelayedScaling(1024)])
    assert [s.step for s in replay.steps] == [0, 2**40, 2**62]
    assert all(t.steps == 3 and t.padding_binades == 0.0 for t in replay.tensors)


def test_a_history_of_zeros_only(tmp_path):
    view = view_of(tmp_path / "run", rows_of({("a", "output", ""): [np.zeros((2, 2))] * 4}))
    [replay] = replay_recipes(view, [DelayedScaling(4)])
    [tensor] = replay.tensors
    assert (tensor.cold_steps, tensor.flushed.high, tensor.saturated.high, tensor.padding_binades) == (
        4,
        0.0,
        0.0,
        None,
    )


# -- blocks -----------------------------------------------------------------------------------------------------------


def block_rows(run, size):
    rows = []
    for row, x in zip(rows_of(run), (x for values in run.values() for x in values), strict=True):
        blocks = blocks_of(x, size)
        amax = blocks.amax.trimmed()
        rows.append(
            row | {f"block{size}_hist": list(blocks.below), f"block{size}_amax_lo": amax.lo,
                   f"block{size}_amax_hist": amax.counts.tolist()}
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("fmt", [MXFP8_E4M3, NVFP4], ids=lambda f: f.name)
def test_blocks_of_all_steps_contain_what_real_block_casts_flush(fmt, tmp_path):
    run = {place: values[:6] for place, values in arrays(3).items()}
    for values in run.values():  # a tensor scale that stays: it is taken from the largest amax of all steps
        values[:] = [x * (4.0 / np.abs(x).max(initial=1e-30)) if x.any() else x for x in values]
    replay = replay_blocks(view_of(tmp_path / "run", block_rows(run, fmt.block[1])), fmt)
    for (module, kind, _), values in run.items():
        found = one(replay, module, kind)
        casts = [(x, cast_blocks(x, fmt)) for x in values]
        total = sum(int((x != 0).sum()) for x, _ in casts)
        flushed = sum(int(((x != 0) & (c.values == 0)).sum()) for x, c in casts)
        clipped = sum(int((np.abs(c.quotients) > fmt.element.overflow_limit).sum()) for _, c in casts)
        assert found.flushed.low - 1e-12 <= flushed / total <= found.flushed.high + 1e-12
        assert found.saturated.low - 1e-12 <= clipped / total <= found.saturated.high + 1e-12
    assert replay.stale_tensors == 0 and not replay.history
    assert math.isclose(replay.flushed.low, np.mean([t.flushed.low for t in replay.tensors]), abs_tol=0.02)


def test_blocks_that_were_not_recorded(tmp_path):
    view = view_of(tmp_path / "run", rows_of(arrays()))
    with pytest.raises(NothingRecordedError, match="block32_hist"):
        replay_blocks(view, MXFP8_E4M3)
    with pytest.raises(UsageError, match="128x128, which are not recorded"):
        replay_blocks(view, TILE_128X128)
