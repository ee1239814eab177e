from __future__ import annotations

import math

import numpy as np
import pytest

from precdoctor.diagnosis.offline.whatif.forecast import Question, forecast
from precdoctor.diagnosis.offline.whatif.gather import Selection, _WorstRows, gather
from precdoctor.diagnosis.offline.whatif.recipe import LADDER, ask
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.errors import CorruptRunError, UsageError
from precdoctor.numerics.casting_array import cast_array
from precdoctor.numerics.formats import E4M3FN, FP16
from precdoctor.runlog import open_run
from tests.support.runs import write_run
from tests.support.tensors import row_of

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal((16, 256)).astype(np.float32)
#: Half of it lies 2^-30 below the rest: E4M3 under one scale loses that half, E5M2 too.
SPLIT = np.where(np.arange(256) < 128, NORMAL, NORMAL * 2.0**-40)
#: 20 binades: too many for E4M3, few for E5M2.
WIDE = NORMAL * np.where(np.arange(256) < 128, 1.0, 2.0**-20)


def run_of(tmp_path, rows, **more):
    return open_run(write_run(tmp_path / "run", rows, [{"step": s} for s in range(4)], **more))


def only(answer):
    (one,) = answer.forecasts
    return one


def test_the_worst_step_is_told_with_its_own_scale(tmp_path):
    rows = [row_of(x * 2.0**step, step=step, module="a") for step, x in enumerate([NORMAL, WIDE, NORMAL])]
    one = only(forecast(run_of(tmp_path, rows), Question(ask("e4m3"))))
    assert one.step == 1 and one.misses == ("flushed",) and one.holds is False
    scale = 448.0 / (np.abs(WIDE).max() * 2.0)
    assert one.prediction.scale == pytest.approx(scale)
    truth = (cast_array(WIDE * 2.0 * scale, E4M3FN, saturate=True) == 0).mean()
    assert one.prediction.flushed.low <= truth <= one.prediction.flushed.high
    assert one.totals.elements == 3 * NORMAL.size
    assert one.totals.flushed[0] / NORMAL.size <= truth <= one.totals.flushed[1] / NORMAL.size
    assert one.instead.recipe.name == "E5M2" and one.instead.recipe.scaling == "tensor"


def test_what_holds_is_the_cheapest_that_does(tmp_path):
    one = only(forecast(run_of(tmp_path, [row_of(SPLIT, module="a")]), Question(ask("e4m3"))))
    assert one.instead.recipe.name == "MXFP8_E4M3"  # halves are whole blocks: each gets a scale of its own
    costs = [r.bits_per_element for r in LADDER]
    assert costs == sorted(costs)
    columns = row_of(SPLIT, module="a", blocks=())
    one = only(forecast(run_of(tmp_path / "plain", [columns]), Question(ask("e4m3"))))
    assert one.instead.recipe.name == "BF16"
    hopeless = row_of([[1e-300, 1.0]] * 8, module="a", dtype="float64", blocks=())
    assert only(forecast(run_of(tmp_path / "none", [hopeless]), Question(ask("bf16")))).instead is None


def test_a_loss_scale_is_exchanged_for_another(tmp_path):
    gradient = NORMAL * 2.0**-28
    rows = [row_of(gradient * 2.0**10, module="a", kind="grad_output", scale=2.0**10)]
    run = run_of(tmp_path, rows)

    def flushed(**options):
        return only(forecast(run, Question(ask("fp16", **options)))).prediction

    def truth(scale):
        return (cast_array(gradient * scale, FP16) == 0).mean()

    assert flushed().flushed.estimate == truth(2.0**10)
    for scale in (1.0, 2.0**4, 2.0**13):
        assert flushed(loss_scale=scale).flushed.low == flushed(loss_scale=scale).flushed.high == truth(scale)
    assert flushed(loss_scale=8.0).scale == 2.0**-7
    # what is not a gradient carries no loss scale
    other = run_of(tmp_path / "b", [row_of(gradient, module="a")])
    assert only(forecast(other, Question(ask("fp16", loss_scale=2.0**20)))).prediction.scale == 1.0


def test_amax_scaling_takes_any_loss_scale_out_again(tmp_path):
    rows = [row_of(NORMAL * 2.0**-9, module="a", kind="grad_output", scale=2.0**6)]
    run = run_of(tmp_path, rows)
    plain, other = (only(forecast(run, Question(ask("e5m2", loss_scale=s)))).prediction for s in (None, 2.0**11))
    assert plain == other


def test_an_fp8_operand_is_asked_about_as_what_it_stands_for(tmp_path):
    stored = cast_array(NORMAL * 64.0, E4M3FN, saturate=True)
    rows = [row_of(stored, module="a", kind="fp8_operand", dtype="float8_e4m3fn", scale=64.0)]
    one = only(forecast(run_of(tmp_path, rows), Question(ask("fp16"))))
    assert one.prediction.scale == 1.0 / 64.0


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**9])
def test_a_fixed_scale(tmp_path, scale):
    one = only(forecast(run_of(tmp_path, [row_of(NORMAL, module="a")]), Question(ask("e4m3", scale=scale))))
    over = (np.abs(NORMAL.astype(np.float64)) * scale > 464.0).mean()
    assert one.prediction.saturated.low <= over <= one.prediction.saturated.high
    assert ("saturated" in one.misses) == (over > 0.0)


def test_rows_with_nan_are_left_out_and_counted(tmp_path):
    bad = NORMAL.copy()
    bad[0, 0] = np.nan
    rows = [row_of(NORMAL, step=0, module="a"), row_of(bad, step=1, module="a"), row_of(bad, step=0, module="b")]
    answer = forecast(run_of(tmp_path, rows), Question(ask("e4m3")))
    assert answer.non_finite == 2 and [f.holds for f in answer.forecasts] == [True, None]
    assert answer.unknown[0].unknown == "every row holds a NaN or Inf"
    masks = np.where(np.arange(256) < 8, -np.inf, NORMAL)  # an attention mask is no accident
    assert only(forecast(run_of(tmp_path / "m", [row_of(masks, module="a")]), Question(ask("e4m3")))).holds


def test_nothing_can_be_told_of_zeros(tmp_path):
    answer = forecast(run_of(tmp_path, [row_of(np.zeros((2, 64)), module="a")]), Question(ask("mxfp8")))
    assert only(answer).holds is None and "not zero" in only(answer).unknown


def test_zeros_at_one_step_do_not_hide_the_others(tmp_path):
    rows = [row_of(np.zeros((2, 64)), step=0, module="a"), row_of(NORMAL, step=1, module="a")]
    for name in ("e4m3", "mxfp8"):
        one = only(forecast(run_of(tmp_path / name, rows), Question(ask(name))))
        assert one.step == 1 and one.holds


def test_what_the_recorded_dtype_had_flushed_counts(tmp_path):
    small = cast_array(NORMAL * 2.0**-25, FP16)
    share = (small == 0).mean()
    rows = [row_of(small, module="a", kind="grad_output", dtype="float16")]
    one = only(forecast(run_of(tmp_path, rows), Question(ask("fp16"))))
    assert one.prediction.flushed.high == 0.0 and one.misses == ("flushed",)
    assert one.lost_before == pytest.approx(share, rel=0.3) and one.flushed == pytest.approx(one.lost_before)
    wider = only(forecast(run_of(tmp_path / "b", rows), Question(ask("bf16"))))
    assert wider.flushed == 0.0 and wider.holds
    ordinary = np.where(RNG.random((16, 256)) < 0.5, 0.0, cast_array(NORMAL, FP16))  # dropout leaves no mark
    rows = [row_of(ordinary, module="a", dtype="float16")]
    assert only(forecast(run_of(tmp_path / "c", rows), Question(ask("fp16")))).lost_before == 0.0


def test_blocks_that_were_not_recorded(tmp_path):
    rows = [row_of(NORMAL, module="a", blocks=()), row_of(NORMAL, module="b")]
    answer = forecast(run_of(tmp_path, rows), Question(ask("mxfp8")))
    assert [f.holds for f in answer.forecasts] == [True, None]
    with pytest.raises(UsageError, match="1x16 blocks are not recorded for any tensor"):
        forecast(run_of(tmp_path / "b", rows), Question(ask("nvfp4")))


def test_steps_without_block_histograms_are_not_said_to_have_been_judged(tmp_path):
    rows = [row_of(NORMAL, module="a", step=s, **({} if s < 2 else {"blocks": ()})) for s in range(3)]
    run = run_of(tmp_path, rows)
    answer = forecast(run, Question(ask("mxfp8")))
    assert answer.steps == (0, 1) and only(answer).holds
    assert forecast(run, Question(ask("e4m3"))).steps == (0, 1, 2)


def test_what_is_asked_about_by_default(tmp_path):
    kinds = ("batch", "input", "output", "grad_output", "weight", "weight_grad", "update", "loss")
    rows = [row_of(NORMAL, module="a", kind=kind) for kind in kinds]
    rows += [row_of(NORMAL[0], module="n", kind="weight", name="bias", blocks=())]
    rows += [row_of(NORMAL * 9, module="r", kind="output", phase="recompute")]
    run = run_of(tmp_path, rows)
    narrow, half = forecast(run, Question(ask("e4m3"))), forecast(run, Question(ask("fp16")))
    assert sorted(f.seen.key.kind for f in narrow.forecasts) == ["grad_output", "input", "output", "weight"]
    assert narrow.vectors == 1 and len(half.forecasts) == 6
    assert forecast(run, Question(ask("e4m3"), kinds=("weight",))).vectors == 0
    assert [f.seen.key.kind for f in forecast(run, Question(ask("e4m3"), kinds=("update",))).forecasts] == ["update"]


def test_selections(tmp_path):
    rows = [row_of(NORMAL, step=s, module=m) for s in range(4) for m in ("blocks.0.a", "blocks.1.a", "head")]
    run = run_of(tmp_path, rows)
    answer = forecast(run, Question(ask("e4m3"), module="blocks.*", steps=(1, 3)))
    assert {f.seen.key.module for f in answer.forecasts} == {"blocks.0.a", "blocks.1.a"} and answer.steps == (1, 2)
    for bad, words in (
        ({"module": "blocks.0.b"}, "did you mean 'blocks.0.a'"),
        ({"kinds": ("update",)}, "no update tensor is recorded; there are output"),
        ({"steps": (9, None)}, "in steps 9:"),
    ):
        with pytest.raises(UsageError, match=words):
            forecast(run, Question(ask("e4m3"), **bad))


def test_a_row_that_contradicts_itself_is_damage(tmp_path):
    row = {**row_of(NORMAL, module="a"), "amax": 1e9}
    with pytest.raises(CorruptRunError, match=r"cannot be true \(step 0, a output\)"):
        forecast(run_of(tmp_path, [row]), Question(ask("e4m3")))


def test_targets(tmp_path):
    run = run_of(tmp_path, [row_of(WIDE, module="a")])
    question = Question(ask("e4m3"), Target(max_flushed=0.9, min_sqnr_db=10.0))
    assert forecast(run, question).failing == ()
    assert only(forecast(run, Question(ask("e4m3"), Target(max_flushed=0.9, min_sqnr_db=60.0)))).misses == ("sqnr",)
    floor = only(forecast(run, Question(ask("mxfp8"), Target(max_flushed=1.0))))
    assert floor.prediction.saturated.estimate > 0.0 and floor.holds  # rounded down on purpose
    up = only(forecast(run, Question(ask("mxfp8", rule="up"), Target(max_flushed=1.0))))
    assert up.prediction.saturated.high == 0.0


@pytest.mark.parametrize("batch_rows", [1, 3, 1 << 20])
def test_how_rows_lie_in_batches_and_ranks_changes_nothing(tmp_path, batch_rows):
    rng = np.random.default_rng(1)
    rows = [
        row_of(np.exp(s * NORMAL[:4] * rng.uniform(0.1, 1)), step=s, module=m, rank=r, kind="output")
        for s in range(4)
        for r in (0, 1)
        for m in ("a", "b", "c")
    ]
    run = run_of(tmp_path, rows, batch_rows=batch_rows, ranks=2)
    whole = run_of(tmp_path / "whole", rows, ranks=2)
    recipes = [ask("e4m3"), ask("mxfp8"), ask("fp16")]
    a, b = (gather(r, Selection(lambda _: True, ["output"]), recipes, Target(), draw=True) for r in (run, whole))
    for one, other in zip(sorted(a.seen, key=lambda s: s.key), sorted(b.seen, key=lambda s: s.key), strict=True):
        assert one.worst == other.worst and one.drawn == other.drawn and one.rows == other.rows == 8
        for mine, theirs in zip(one.totals.values(), other.totals.values(), strict=True):
            assert mine.counts[:3].tolist() == theirs.counts[:3].tolist()
            assert mine.flushed[2] == pytest.approx(theirs.flushed[2])


def test_memory_follows_the_number_of_tensors_not_of_rows(tmp_path, monkeypatch):
    """Every batch brings a worse row for every tensor; what is kept stays bounded, and each batch is read once."""
    held = []
    put = _WorstRows.put
    monkeypatch.setattr(_WorstRows, "put", lambda self, *a: (put(self, *a), held.append(self._size))[0])
    tensors, copies = 8, 600
    rows = [row_of(np.exp(2 * NORMAL[:1]), module=f"m{i}", kind="output", numel=256) for i in range(tensors)]
    run = run_of(tmp_path, rows)
    (batch,) = run.batches("tensors")
    reads = []

    class Long:
        def batches(self, table, columns, filters):
            import pyarrow as pa

            for n in range(copies):
                reads.append(n)
                wider = batch.set_column(
                    batch.schema.get_field_index("exp_lo"), "exp_lo", pa.array([-20 - n // 5] * tensors, pa.int32())
                )
                yield wider.select(columns)

    found = gather(Long(), Selection(lambda _: True, ["output"]), [ask("fp16")], Target())
    assert found.rows == tensors * copies and reads == list(range(copies))
    assert len(held) > 50  # rows were replaced time and again
    assert max(held) <= 5 * tensors + 1024


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("e4m4",), "did you mean 'E4M3FN'"),
        (("mxfp8", {"scaling": "tensor"}), "MXFP8_E4M3 implies --scaling block32"),
        (("fp16", {"scaling": "channel"}), "not used with a scale per channel"),
        (("e4m3", {"scaling": "tile128x128"}), "128x128 tile is not recorded"),
        (("128x128",), "128x128 tile is not recorded"),
        (("e8m0",), "holds the scales of blocks"),
        (("bf16", {"scaling": "block32"}), "not used with block scales"),
        (("e4m3", {"scale": math.nan}), "--scale nan"),
        (("e4m3", {"scale": math.inf}), "--scale inf"),
        (("e4m3", {"scale": 0.0}), "--scale 0"),
        (("e4m3", {"scale": -2.0}), "--scale -2"),
        (("fp16", {"loss_scale": 0.0}), "--loss-scale 0"),
        (("mxfp8", {"scale": 2.0}), "does not go with"),
        (("e4m3", {"rule": "up"}), "not a block format"),
    ],
)
def test_recipes_that_cannot_be(arguments, words):
    name, *options = arguments
    with pytest.raises(UsageError, match=words):
        ask(name, **(options[0] if options else {}))


@pytest.mark.parametrize(
    ("name", "scaling", "block", "bits"),
    [
        ("e4m3", None, None, 8.0),
        ("bf16", None, None, 16.0),
        ("int8", None, None, 8.0),
        ("e4m3", "tile128", "TILE_1X128", 8.25),
        ("e4m3", "block32", "MXFP8_E4M3", 8.25),
        ("e2m1", "block32", "MXFP4", 4.25),
        ("e2m1", "block16", "NVFP4", 4.5),
        ("e5m2", "tile128", "E5M2_1X128", 8.25),
        ("nvfp4", "block16", "NVFP4", 4.5),
    ],
)
def test_recipes(name, scaling, block, bits):
    recipe = ask(name, scaling=scaling)
    assert recipe.bits_per_element == bits
    assert (recipe.block.name if recipe.block else None) == block
    assert recipe.scaling == (scaling or {"e4m3": "tensor", "int8": "tensor", "bf16": "none", "nvfp4": "block16"}[name])
