"""FP8 operands read from a log: what a cast cost, which recipe made the scales, and what another would have done."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.engine import diagnose_view, resolve_options
from precdoctor.diagnosis.families.fp8.fp8_casts import Operand, operands
from precdoctor.diagnosis.families.fp8.fp8_damage import damage, rounding_db, rounding_magnitude
from precdoctor.diagnosis.families.fp8.fp8_outliers import bulk_of, dead_blocks
from precdoctor.diagnosis.families.fp8.fp8_prescriptions import block_damage, cures, smallest, works
from precdoctor.diagnosis.families.fp8.wrong_fp8_scale_recipes import recipe_of, recorded_effect, replayed_effect
from precdoctor.diagnosis.prescriptions.prescribed import prescribe
from precdoctor.diagnosis.registry import RULES
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.blocks import TILE_1X128
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import E4M3FN, E5M2, Format
from precdoctor.numerics.fp8_scaling import Amax, CurrentScaling, DelayedScaling
from tests.support.fp8 import add_operand, current, delayed, draws, fill, operand_row
from tests.support.references import blocks_of, cast_blocks, statistics_of
from tests.support.training import Training

UP = "blocks.0.mlp.up"


def only(run: Training, path: Path) -> tuple[RunView, Operand]:
    """The one operand of a run."""
    view = RunView(run.write(path))
    [operand] = operands(view).values()
    return view, operand


def with_input(cast, path: Path, steps: int = 24, fmt: Format = E4M3FN) -> Operand:
    return only(add_operand(Training(steps), UP, "input", cast, fmt), path)[1]


def test_a_cast_outside_of_modules_has_no_empty_name(tmp_path):
    run = add_operand(Training(24), UP, "input", current(draws(6)), E4M3FN)
    run.change(lambda r: r.update(root="", module="", name="cast.2"), kind="fp8_operand")
    view, operand = only(run, tmp_path)
    row = next(r for r in view.rows(view.processes[0], 3) if r.kind == "fp8_operand")
    assert operand.label == row.label == "FP8 operand `cast.2` outside of modules"
    assert all("``" not in cure.words and "''" not in cure.snippet for cure in cures(view, operand))


def sqnr(x: np.ndarray, back: np.ndarray) -> float:
    return 10.0 * math.log10((x**2).sum() / ((x - back) ** 2).sum())


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
def test_rounding_alone_costs_what_is_said(fmt):
    x = np.exp2(np.random.default_rng(0).uniform(-3.0, 3.0, 200_000))  # significands spread as 1/x
    back = cast_array(x, fmt)
    assert sqnr(x, back) == pytest.approx(rounding_db(fmt), abs=1.0)
    assert float(np.mean(np.abs(x - back) / x)) == pytest.approx(rounding_magnitude(fmt), rel=0.03)


@pytest.mark.parametrize("sigma", [2.0**-8, 2.0**-6, 1.0, 90.0, 400.0])
def test_the_cost_of_a_cast_is_what_casting_costs(sigma):
    x = np.random.default_rng(1).standard_normal(100_000) * sigma
    back = cast_array(x, E4M3FN, saturate=True)
    found = damage(statistics_of(x), E4M3FN)
    flushed = np.abs(x) <= E4M3FN.flush_limit
    assert found.sqnr_db == pytest.approx(sqnr(x, back), abs=0.5)
    assert found.flushed == pytest.approx(float(flushed.mean()), abs=0.002)
    assert found.lost_magnitude == pytest.approx(float(np.abs(x[flushed]).sum() / np.abs(x).sum()), abs=0.01)
    assert found.lost_db == pytest.approx(max(0.0, rounding_db(E4M3FN) - found.sqnr_db))


@pytest.mark.parametrize(("history", "margin"), [(1, 0), (4, 0), (16, 1)])
def test_the_recipe_behind_the_scales_is_recognised(history, margin, tmp_path):
    wild = lambda s: draws(1)(s) * 2.0 ** ((s * 7) % 11)  # noqa: E731
    operand = with_input(delayed(wild, history, margin=margin), tmp_path / "run", 40)
    assert recipe_of(operand) == DelayedScaling(history, Amax.MAX, margin)


def test_scales_of_no_recipe_are_of_none(tmp_path):
    assert recipe_of(with_input(current(draws(2)), tmp_path / "a", 40)) is None
    rng = np.random.default_rng(3)
    random = {s: float(2.0 ** rng.uniform(-4, 4)) for s in range(40)}
    assert recipe_of(with_input(lambda s: (draws(2)(s), random[s]), tmp_path / "b", 40)) is None


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(4, Amax.MAX), DelayedScaling(16, Amax.MAX, 1)])
def test_what_another_recipe_would_have_done_is_what_it_does(recipe, tmp_path):
    """The log of one recipe foretells the log of another, recorded on the same data."""
    batches = lambda s: draws(4)(s) * (16.0 if s % 5 == 3 else 1.0)  # noqa: E731
    limits = {"stale_db": 10.0, "flushed_share": 0.04}
    told = replayed_effect(with_input(delayed(batches, 1), tmp_path / "a"), recipe, limits)
    cast = current(batches)
    if isinstance(recipe, DelayedScaling):
        cast = delayed(batches, recipe.history, margin=recipe.margin)
    done = recorded_effect(with_input(cast, tmp_path / "b"), limits)
    assert told.stale == done.stale
    assert told.clipped == pytest.approx(done.clipped, rel=0.2, abs=0.002)
    assert told.flushed == pytest.approx(done.flushed, abs=0.002)


def test_the_prescribed_history_does_what_it_promises(tmp_path):
    """Diagnose, apply, diagnose again."""
    batches = lambda s: draws(5)(s) * (32.0 if s % 4 == 3 else 1.0)  # noqa: E731
    before = diagnose(add_operand(Training(32), UP, "input", delayed(batches, 1)).write(tmp_path / "before"))
    [finding] = [f for f in before.findings if f.code == "PD404"]
    [prescription] = finding.prescriptions
    _, history, _ = prescription.change["fp8_recipe"]["to"].split(":")
    operand = with_input(delayed(batches, int(history)), tmp_path / "after", 32)
    stale = recorded_effect(operand, {"stale_db": 10.0, "flushed_share": 0.04}).stale
    assert len(stale) == prescription.predicted["stale_steps"]["to"] < prescription.predicted["stale_steps"]["from"]
    after = diagnose(add_operand(Training(32), UP, "input", delayed(batches, int(history))).write(tmp_path / "again"))
    assert [f.code for f in after.findings] == []


def test_an_invalid_amax_takes_the_stale_scale_of_the_same_operand_along(tmp_path):
    stale = delayed(lambda s: draws(5)(s) * (32.0 if s % 4 == 3 else 1.0), 1)
    cast = lambda s: (np.zeros((32, 256)), math.inf) if s == 6 else stale(s)  # noqa: E731
    both = diagnose(add_operand(Training(32), UP, "input", cast).write(tmp_path / "both"))
    [finding] = both.findings
    assert (finding.code, finding.cause) == ("PD404", "invalid-amax")
    assert any("stale on" in c["message"] for c in finding.evidence["consequences"])


def test_the_bulk_beside_an_outlier_is_what_casting_leaves_of_it(tmp_path):
    def draw(step):
        x = draws(6, (64, 1024))(step)
        x[:, 3] *= 2.0**14.5
        return x

    bulk = bulk_of(with_input(current(draw), tmp_path / "run", 6))
    x = draw(3)
    back = cast_array(x * fill(x), E4M3FN) / fill(x)
    rest = np.arange(1024) != 3
    assert bulk is not None and bulk.magnitude >= rounding_magnitude(E4M3FN)
    assert bulk.outliers == pytest.approx(1 / 1024, rel=0.1)
    assert bulk.sqnr_db == pytest.approx(sqnr(x[:, rest], back[:, rest]), abs=1.0)


@pytest.mark.parametrize("spread", [0.0, 1.5, 3.0])
def test_blocks_cost_what_casting_to_blocks_costs(spread, tmp_path):
    """Rows of all sizes, log-normal."""
    sizes = np.exp(spread * np.random.default_rng(7).standard_normal((64, 1)))
    draw = lambda s: draws(7, (64, 1024))(s) * sizes  # noqa: E731
    view, operand = only(add_operand(Training(6), UP, "input", current(draw)), tmp_path / "run")
    found = block_damage(view, operand, TILE_1X128)
    x = draw(3)
    cast = cast_blocks(x, TILE_1X128).values
    assert found is not None
    assert found.sqnr_db == pytest.approx(sqnr(x, cast), abs=1.0)
    assert found.flushed == pytest.approx(float(((cast == 0) & (x != 0)).mean()), abs=0.001)


def test_the_smallest_change_that_is_enough_comes_first(tmp_path):
    """A scale where the scale is wrong; E5M2 where E4M3's range is; the tensor's own dtype always works."""
    view, padded = only(add_operand(Training(), UP, "input", lambda s: (draws(8)(s), 2.0**-12)), tmp_path / "a")
    assert "own amax" in smallest(view, padded, 0.04, 3.0).words
    wide = lambda s: np.exp(4.0 * draws(9)(s))  # noqa: E731
    view, gradient = only(add_operand(Training(), UP, "grad_output", current(wide)), tmp_path / "b")
    words = [c.words for c in cures(view, gradient)]
    assert "E5M2" in words[0] and "float32" in words[-1]
    assert works(list(cures(view, gradient))[-1].damage, 0.04, 3.0)


def test_casts_of_one_step_are_taken_together(tmp_path):
    """Two micro-steps of one step at scales of their own: counts add up, the larger one speaks for both."""
    run = add_operand(Training(4), UP, "input", lambda s: (draws(10)(s), 100.0))
    for rows in run.tensors.values():
        at = next(i for i, r in enumerate(rows) if r["kind"] == "fp8_operand")
        rows.insert(at + 1, {**rows[at], **operand_row(draws(11)(0) * 50.0, 10.0)})
    _, operand = only(run, tmp_path / "run")
    assert [c.numel for c in operand.casts] == [2 * draws(10)(0).size] * 4
    assert all(c.scale == 10.0 and c.saturated_share > 0.0 for c in operand.casts)


def test_recomputed_casts_do_not_count_twice(tmp_path):
    run = add_operand(Training(4), UP, "input", current(draws(12)))
    for rows in run.tensors.values():
        row = next(r for r in rows if r["kind"] == "fp8_operand")
        rows.append({**row, "phase": "recompute", "call": 1, "order": len(rows)})
    _, operand = only(run, tmp_path / "run")
    assert operand.key[-1] == 0


def test_a_row_that_contradicts_itself_is_no_reason_to_stop(tmp_path):
    run = add_operand(Training(), UP, "input", current(draws(13)))
    run.change(lambda r: r.update(amax=1e9), kind="fp8_operand", step=5)
    diagnosis = diagnose(run.write(tmp_path / "run"))
    assert {r.code: r.status.value for r in diagnosis.rules}["PD402"] == "passed"


def test_what_fp8_needs_is_never_taken_for_a_change_of_autocast(tmp_path):
    """Keeping a module out of FP8 takes an edit: running it outside autocast would not undo its casts."""
    wide = lambda s: np.exp(6.0 * draws(14)(s))  # noqa: E731
    run = add_operand(Training(), UP, "input", lambda s: (wide(s), 1e-6))
    view = RunView(run.write(tmp_path / "run"))
    diagnosis = diagnose_view(view, RULES, resolve_options({}))
    prescribed = prescribe(view, diagnosis)
    assert prescribed
    assert not any(p.apply for p in prescribed)


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2])
def test_a_block_is_dead_when_every_element_of_it_is_flushed(fmt):
    x = np.exp2(np.random.default_rng(4).uniform(-24.0, 2.0, (64, 1))) * np.linspace(0.5, 1.0, 32)
    gone = (cast_array(x, fmt) == 0.0).all(axis=1).mean()
    assert dead_blocks(blocks_of(x, 32), fmt) == pytest.approx(gone, abs=0.05)


def test_blocks_are_read_where_they_were_recorded(tmp_path):
    run = add_operand(Training(24), UP, "input", current(draws(5)), E4M3FN)
    for step, rows in run.tensors.items():
        for row in rows:
            if row["kind"] == "fp8_operand" and step not in (0, 7):
                row.update({c: None for c in row if c.startswith("block")})
    view, operand = only(run, tmp_path / "run")
    assert block_damage(view, operand, TILE_1X128) is not None
