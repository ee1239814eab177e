"""Questions to a run of ``record --inference``: scales by group, memory per token, a plan."""

from __future__ import annotations

import math

import numpy as np
import pytest

from precdoctor.diagnosis.offline.whatif.cache import cache_of
from precdoctor.diagnosis.offline.whatif.forecast import Question, forecast
from precdoctor.diagnosis.offline.whatif.inference_plan import make_inference_plan
from precdoctor.diagnosis.offline.whatif.recipe import ask
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.errors import UsageError
from precdoctor.runlog import open_run
from tests.support.runs import write_run
from tests.support.tensors import grouped_row_of, row_of

RNG = np.random.default_rng(0)
ATTENTION = {"module": "layers.0.attention", "module_class": "Attention"}


def keys(*, outlier=1.0, tokens=48, step=0, **columns):
    x = RNG.standard_normal((2, 4, tokens, 64))
    x[:, :, :, 5] *= outlier
    return grouped_row_of(x, "kv_key", step=step, order=5, **{**ATTENTION, **columns})


def values(**columns):
    return grouped_row_of(RNG.standard_normal((2, 4, 48, 64)), "kv_value", step=0, order=6, **{**ATTENTION, **columns})


def weight(name, *, outlier=1.0, order=10, kind="Linear"):
    w = RNG.standard_normal((64, 64))
    w[3] *= outlier
    place = {"module": name, "module_class": kind, "step": 0}
    return [
        grouped_row_of(w, "weight", name="weight", **place),
        grouped_row_of(RNG.standard_normal((2, 6, 64)), "output", order=order, **place),
    ]


def run_of(tmp_path, rows):
    return open_run(write_run(tmp_path / "run", rows, [{"step": 0, "optimizer": "", "micro_steps": 0}]))


def answer(tmp_path, rows, name, scaling=None, **options):
    return forecast(run_of(tmp_path, rows), Question(ask(name, scaling=scaling), **options))


def test_a_scale_per_channel_saves_keys_with_an_outlier_channel(tmp_path):
    rows = [keys(outlier=60.0), values(), *weight("head")]
    for scaling, holds in (("tensor", False), ("head", False), ("token", False), ("channel", True)):
        found = answer(tmp_path / scaling, rows, "int4", scaling, kinds=("kv_key",), target=Target(min_sqnr_db=17.0))
        sizes = {f.seen.key.kind: f for f in found.forecasts}
        # The outlier alone holds most of the energy, and it is what every scale follows.
        assert (sizes["kv_key"].flushed < 0.3) is holds


def test_kinds_without_such_groups_are_left_out_or_refused(tmp_path):
    rows = [keys(), values(), *weight("head")]
    asked = {s: answer(tmp_path / s, rows, "int8", s).kinds for s in ("tensor", "token", "channel", "head")}
    assert "weight" in asked["tensor"] and "grad_output" in asked["tensor"]
    assert asked["token"] == ("input", "output", "kv_key", "kv_value")
    assert asked["channel"] == ("input", "output", "weight", "kv_key", "kv_value")
    assert asked["head"] == ("kv_key", "kv_value")
    words = "--scaling token cannot be asked of weight: it has no tokens; choose from channel, group128"
    with pytest.raises(UsageError, match=words):
        answer(tmp_path / "weight", rows, "int8", "token", kinds=("weight",))
    with pytest.raises(UsageError, match="cannot be asked of grad_output"):
        answer(tmp_path / "gradient", rows, "int8", "channel", kinds=("grad_output",))


def test_a_run_without_groups_says_what_records_them(tmp_path):
    rows = [row_of(RNG.standard_normal((8, 8)), kind="output", step=0)]
    with pytest.raises(UsageError, match="per token are not recorded .*precdoctor record --inference"):
        answer(tmp_path, rows, "int8", "token")


def test_integers_are_judged_by_their_sqnr_alone(tmp_path):
    found = answer(tmp_path, [keys(), values()], "int8", "token")
    assert all(f.flushed > found.question.target.max_flushed and f.holds for f in found.forecasts)


def test_what_would_hold_is_looked_for_among_groups(tmp_path):
    found = answer(tmp_path, [values(), keys()], "int8", "tensor", target=Target(min_sqnr_db=42.0))
    assert {f.instead.recipe.short() for f in found.failing} == {"INT8 per channel"}


@pytest.mark.parametrize(
    ("name", "scaling", "bits"),
    [
        ("int8", "token", 2 * 4 * (64 * 8 + 16)),
        ("int8", "head", 2 * 4 * 64 * 8),
        ("int4", "group128", 2 * 4 * (64 * 4 + 16)),
        ("nvfp4", None, 2 * 4 * (64 * 4 + 4 * 8)),
        ("mxfp8", None, 2 * 4 * (64 * 8 + 2 * 8)),
    ],
)
def test_memory_per_token_comes_from_the_shapes(tmp_path, name, scaling, bits):
    rows = [keys(dtype="bfloat16"), values(dtype="bfloat16")]
    found = answer(tmp_path, rows, "e4m3")
    (layer,) = cache_of((f.seen for f in found.forecasts), lambda _: ask(name, scaling=scaling))
    assert (layer.module, layer.heads, layer.features) == ("layers.0.attention", 4, 64)
    assert (layer.now, layer.asked) == (2 * 4 * 64 * 2, bits / 8)


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan(tmp_path, rows, **options):
    return make_inference_plan(run_of(tmp_path, rows), options.pop("target", Target(min_sqnr_db=17.0)), **options)


def choices(made):
    return {
        (t.seen.key.module, t.seen.key.kind): "wide" if t.recipe is None else t.recipe.short() for t in made.tensors
    }


def test_each_tensor_gets_the_narrowest_that_holds(tmp_path):
    rows = [
        *weight("embed", kind="Embedding", order=1), *weight("even", order=8), *weight("uneven", order=9, outlier=1e4),
        keys(), values(), *weight("head", order=99),
    ]  # fmt: skip
    made = plan(tmp_path, rows)
    assert choices(made) == {
        ("embed", "weight"): "wide", ("even", "weight"): "INT4 per channel",
        ("uneven", "weight"): "INT4 per channel", ("head", "weight"): "wide",
        ("layers.0.attention", "kv_key"): "INT4 per channel", ("layers.0.attention", "kv_value"): "INT4 per channel",
    }  # fmt: skip
    reasons = {t.seen.key.module: t.reason for t in made.tensors if t.seen.key.kind == "weight"}
    assert reasons["embed"].startswith("embedding") and reasons["head"].startswith("final logits")
    assert reasons["even"].startswith("INT4 per tensor at step 0: SQNR 1")
    assert made.weights == (4 * 64 * 64 * 4, 2 * 64 * 64 * 4 + 2 * 64 * 64 // 2)
    assert made.cache[0].asked == 2 * 4 * 64 / 2
    assert {r.short() for r in made.recipes} == {"INT4 per channel"}
    assert any("Rests on 1 recorded call" in line for line in made.warnings)


def test_a_high_target_takes_more_bits_up_to_none_at_all(tmp_path):
    rows = [*weight("body", order=8), keys(), *weight("head", order=99)]
    for least, choice in ((30.0, "INT8 per tensor"), (42.0, "INT8 per channel"), (150.0, "wide")):
        made = plan(tmp_path / str(least), rows, target=Target(min_sqnr_db=least))
        assert choices(made)["body", "weight"] == choice
    (body,) = (t for t in made.tensors if t.seen.key.module == "body")
    assert body.bits == 32.0 and body.prediction is None and "SQNR" in body.reason


def test_modules_are_chosen_by_name(tmp_path):
    rows = [*weight("body"), *weight("other"), keys()]
    assert set(choices(plan(tmp_path / "a", rows, module="layers.*"))) == {("layers.0.attention", "kv_key")}
    with pytest.raises(UsageError, match="no module matching 'nothing'"):
        plan(tmp_path / "b", rows, module="nothing")


def test_a_model_without_a_cache_is_planned_and_told_so(tmp_path):
    made = plan(tmp_path, [*weight("body"), *weight("head", order=99)])
    assert made.cache == () and any("No keys and values" in line for line in made.warnings)
    assert math.isinf(made.target.max_flushed)
