"""The drawings say what the data says."""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy as np
import pytest
from rich.cells import cell_len

from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Severity
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.formats import E4M3FN
from precdoctor.reporting.html import about, cards, heatmap, rangemap, svg, trends
from precdoctor.reporting.html.layers import elided, in_order, label
from precdoctor.reporting.html.survey import Survey, TensorId
from precdoctor.reporting.html.timeline import BUCKETS, reduce, series, timeline
from precdoctor.runlog import open_run
from tests.support.runs import write_run


def opened(path, rows=(), steps=None, **options):
    steps = steps or [{"step": s, "loss": 1.0} for s in sorted({r["step"] for r in rows})]
    return RunView(open_run(write_run(path, rows, steps, **options)))


# -- timeline ---------------------------------------------------------------------------------------------------------


def test_reducing_keeps_every_extreme_and_every_stretch_that_is_not_finite():
    rng = np.random.default_rng(0)
    values = rng.standard_normal(20_000)
    values[[123, 9_999]] = 50.0, -50.0
    values[[7, 15_000]] = math.nan, math.inf
    kept = reduce(np.arange(20_000), values)
    assert {123, 9_999, 7, 15_000} <= set(kept) and len(kept) <= 3 * BUCKETS and kept == sorted(kept)
    assert reduce(np.arange(10), values[:10]) == list(range(10))


def test_a_nan_loss_is_a_gap_with_a_mark_and_a_missing_one_just_a_gap(tmp_path):
    steps = [{"step": s, "loss": math.nan if s == 2 else 3.0 - s} for s in range(4)] + [{"step": 4, "loss": None}]
    view = opened(tmp_path / "run", steps=steps)
    found = series(view, "loss")
    assert found.steps.tolist() == [0, 1, 2, 3] and not np.isfinite(found.values[2])
    panel = timeline([view], []).panels[0]
    assert panel.drawing.count("×") == 1
    assert panel.table == [("A", "3", "0", "3", "0", "0", "1")]
    assert len(re.findall("M", re.search(r'd="([^"]*)"', panel.drawing)[1])) == 2


@pytest.mark.parametrize("column", ["grad_norm", "lr", "loss_scale"])
def test_a_nan_of_every_series_has_a_mark_and_a_missing_value_has_none(tmp_path, column):
    values = [1.0, math.nan, None, math.inf, 1.0]
    view = opened(tmp_path / "run", steps=[{"step": s, "loss": 1.0, column: v} for s, v in enumerate(values)])
    found = series(view, column)
    assert found.steps.tolist() == [0, 1, 3, 4] and np.isfinite(found.values).tolist() == [True, False, False, True]
    assert [panel.drawing.count("×") for panel in timeline([view], []).panels] == [0, 2]


def test_of_several_ranks_the_worst_value_is_drawn(tmp_path):
    steps = [{"step": 0, "rank": r, "loss": 1.0, "grad_norm": 1.0 + r} for r in range(3)]
    assert series(opened(tmp_path / "run", steps=steps, ranks=3), "grad_norm").values.tolist() == [3.0]


def test_a_long_timeline_says_what_it_reduced(tmp_path):
    steps = [{"step": s, "loss": 99.0 if s == 1234 else 1.0} for s in range(1500)]
    found = timeline([opened(tmp_path / "run", steps=steps)], [])
    assert "1,500 steps" in found.reduced and "every spike" in found.reduced
    assert found.panels[0].high == "99" and found.panels[0].table[0][4] == "1,234"


# -- layers -----------------------------------------------------------------------------------------------------------


def test_layers_stand_in_order_of_execution_and_gradients_beside_them(tmp_path):
    rows = [
        {"step": 0, "kind": kind, "module": module, "order": order, "name": name}
        for kind, module, order, name in [
            ("grad_output", "first", 9, ""),
            ("output", "second", 2, ""),
            ("output", "first", 1, ""),
            ("grad_output", "second", 8, ""),
            ("weight", "unseen", None, "weight"),
            ("weight", "second", None, "weight"),
        ]
    ]
    modules = [{"name": n, "class": "M"} for n in ("first", "unseen", "second")]
    view = opened(tmp_path / "run", rows, facts={"roots": [{"name": "Net#0", "class": "Net", "modules": modules}]})
    survey = Survey(view)
    shown = [(survey.tensors[t].kind, survey.tensors[t].module) for t in in_order(view, survey)]
    assert shown == [
        *(("output", "first"), ("output", "second"), ("grad_output", "first"), ("grad_output", "second")),
        *(("weight", "unseen"), ("weight", "second")),
    ]


def test_labels_near_the_ends_of_an_axis_stay_inside_it():
    drawn = svg.axis(((share, "1") for share in (0.0, 0.02, 0.5, 0.98, 1.0)), "13")
    assert re.findall(r'text-anchor="(\w+)"', drawn) == ["start", "start", "middle", "end", "end"]


def test_labels():
    assert label(TensorId("Net#0", "a.b", "weight", "bias", "float32", 0)) == "a.b.bias"
    assert label(TensorId("Net#0", "a.b", "output", "logits", "float32", 1)) == "a.b [logits] #2"
    assert label(TensorId("Net#0", "", "output", "", "float32", 0)) == "Net#0"
    assert label(TensorId("Net#1", "a", "output", "", "float32", 0), several_roots=True) == "Net#1 a"


def test_names_lose_what_all_begin_with_and_keep_the_layer_and_the_end():
    names = [*(f"model.transformer.h.{n}.attn.c_attn" for n in (0, 11)), "model.transformer.ln_f", "lm_head"]
    assert list(elided(names, 40).values()) == names
    assert list(elided(names, 20).values()) == ["…h.0.attn.c_attn", "…h.11.attn.c_attn", "…ln_f", "lm_head"]
    towers = ["model.text.attn.query", "model.vision.attn.a_projection_with_a_long_name"]
    assert elided(towers, 30)[towers[0]] == "…text.attn.query", "the names part, and then agree again"


@pytest.mark.parametrize("limit", [22, 30, 42])
def test_names_that_differ_still_do_when_their_middle_is_left_out(limit):
    names = [
        *(
            f"model.layers.{n}.mlp.experts.{m}.{p}_proj.weight"
            for n in (3, 30)
            for m in (1, 17)
            for p in ("up", "down")
        ),
        *(f"{net}#0 main.{n}.self_attention_projection" for net in ("Generator", "Discriminator") for n in (1, 12)),
        *(f"{side}coder.layers.{n}.self_attn_layer_norm" for side in ("en", "de") for n in (1, 12)),
        *(f"layers.{n}.blocks.{m}.attn.qkv.weight" for n in (0, 2) for m in (1, 11)),
        *(f"vgg.features.a_very_long_name_of_the_last_layer_{end}" for end in "ab"),
        *("x" * n for n in (1, 60)),
        *(f"{'漢字' * 20}.{n}.weight" for n in (1, 2)),
        *("student.encoder.block.weight", "teacher.encoder.block.weight", "." * 60, " "),
    ]
    short = elided(names, limit)
    assert list(short) == names and len(set(short.values())) == len(names)
    assert max(map(cell_len, short.values())) <= limit
    for name, text in short.items():
        assert text == name or "…" in text
        layers = re.findall(r"\.(\d+)\.", name)
        assert all(layer in text for layer in layers)


# -- layer x step -----------------------------------------------------------------------------------------------------


def test_what_led_to_the_first_nan_is_shown_before_what_it_contaminated(tmp_path):
    rows = [
        {"step": s, "module": m, "dtype": "float16", "numel": 10, "amax": 2.0 ** (s + 9) if m == "hot" else 1.0,
         "nan": int(s >= (6 if m == "hot" else 7))}
        for s in range(10) for m in ("hot", *(f"late{i}" for i in range(40)))
    ]  # fmt: skip
    view = opened(tmp_path / "run", rows)
    found = heatmap.saturation(view, Survey(view))
    shown = [r for r in found.rows if r.full]
    assert len(shown) == heatmap.ROWS
    assert (shown[0].full, shown[0].worst, shown[0].steps) == ("hot", "NaN or Inf", "6")
    assert "32 tensors of 41, the most telling of 41" in found.note
    assert found.drawing.count('class="rx"') == 1 and "M6 1.06h4v.88H6z" in found.drawing


def test_nothing_to_see_draws_nothing(tmp_path):
    view = opened(tmp_path / "run", [{"step": 0, "numel": 4, "amax": 1.0}])
    survey = Survey(view)
    assert heatmap.saturation(view, survey) is None and heatmap.underflow(view, survey) is None
    assert trends.updates(view, survey) is None and trends.forecasts(view, survey) == []


@pytest.mark.parametrize(("share", "level"), [(0.0005, 1), (0.001, 2), (0.06, 4), (0.5, 7), (1.0, 7)])
def test_levels_of_underflow(tmp_path, share, level):
    view = opened(tmp_path / "run", [{"step": 0, "numel": 10_000, "subnormal": round(10_000 * share), "amax": 1.0}])
    found = heatmap.underflow(view, Survey(view))
    assert f'class="s{level}"' in found.drawing


def test_a_format_that_is_filled_by_its_scale_has_no_headroom_to_lose(tmp_path):
    rows = [{"step": s, "dtype": "float8_e4m3fn", "numel": 4, "amax": 448.0, "at_max": 1} for s in range(9)]
    view = opened(tmp_path / "run", rows)
    assert heatmap.saturation(view, Survey(view)) is None and trends.forecasts(view, Survey(view)) == []


# -- forecasts --------------------------------------------------------------------------------------------------------


def shrinking(path, amax):
    rows = [{"step": s, "dtype": "float16", "numel": 4, "amax": amax(s)} for s in range(0, 200, 10)]
    view = opened(path, rows)
    return trends.forecasts(view, Survey(view))


def test_steady_growth_is_continued_to_the_end_of_the_format(tmp_path):
    (found,) = shrinking(tmp_path / "run", lambda s: 2.0 ** (8 + s / 40))
    # 2^16 (65504) is reached where 8 + s/40 = 16
    assert found["urgent"] and found["reaches"] == "about step 320"
    assert found["rate"] == "-2.5 binades per 100 steps"


def test_noise_is_no_forecast(tmp_path):
    rng = np.random.default_rng(1)
    (found,) = shrinking(tmp_path / "run", lambda s: 2.0 ** (12 + rng.uniform(-1, 1)))
    assert not found["urgent"] and found["reaches"] == found["rate"] == "no steady trend"


def test_slow_growth_is_not_extrapolated_beyond_what_was_seen_again(tmp_path):
    (found,) = shrinking(tmp_path / "run", lambda s: 2.0 ** (4 + s / 1000))
    assert not found["urgent"] and found["reaches"] == "not within the next 190 steps"


# -- the range map ----------------------------------------------------------------------------------------------------


def test_steps_are_chosen_first_last_wanted_then_evenly():
    recorded = list(range(0, 1000, 2))
    chosen = rangemap.choose_steps(recorded, [100, 102, 333], 12)
    assert {0, 998, 100, 102} <= set(chosen) and 333 not in chosen and len(chosen) == 12
    assert max(b - a for a, b in itertools.pairwise(chosen)) < 150
    assert rangemap.choose_steps([1, 2, 3], [], 12) == [1, 2, 3]


def test_ranks_are_merged_and_different_scales_are_not(tmp_path):
    row = {"step": 0, "numel": 3, "amax": 2.0, "amin_nonzero": 1.5, "exp_lo": 0, "exp_hist": [3]}
    rows = [
        {**row, "rank": 0, "module": "a"},
        {**row, "rank": 1, "module": "a", "amax": 4.0, "exp_hist": [2, 1]},
        {**row, "rank": 0, "module": "b", "scale": 2.0},
        {**row, "rank": 1, "module": "b", "scale": 4.0},
    ]
    view = opened(tmp_path / "run", rows, ranks=2)
    found = rangemap.RangeMap(view, Survey(view), []).data()["steps"][0]["rows"]
    assert found == [[0, 6, 0, 0, 0, 4.0, 1.5, 1.0, 0, "5.1"], [1, 3, 0, 0, 0, 2.0, 1.5, 2.0, 0, "3"]]


def test_all_steps_are_added_up_as_in_memory_while_the_scale_stays_the_same(tmp_path):
    def all_steps(name, *scales, lo=0):
        row = {
            "numel": 4,
            "zero": 1,
            "amax": 2.0 ** (lo + 1),
            "amin_nonzero": 1.5 * 2.0**lo,
            "exp_lo": lo,
            "exp_hist": [3],
        }
        view = opened(tmp_path / name, [{**row, "step": s, "scale": scale} for s, scale in enumerate(scales)])
        return rangemap.RangeMap(view, Survey(view), []).data()["all"][0]

    assert all_steps("same", 8.0, 8.0) == [0, 8, 2, 0, 0, 2.0, 1.5, 8.0, 0, "6"]
    assert all_steps("changed", 8.0, 4.0) == [0, 8, 2, 0, 0, 0.5, 1.5 / 8.0, 1.0, -3, "3.3"]
    # 2^-149 with a scale of 2^16 in force stands for less than the lowest bin
    assert all_steps("tiny", 65536.0, lo=-150)[7:] == [1.0, -160, "3"]


def test_counts_are_exact_however_large():
    counts = [0, 35, 36, 2**53 - 1]
    text = rangemap._encoded(rangemap.ExponentHistogram.of(-3, counts))
    assert text == (-2, "z.10.2gosa7pa2gv")
    assert int("2gosa7pa2gv", 36) == 2**53 - 1


def test_the_limits_of_a_format_survive_json():
    data = json.loads(json.dumps(rangemap.format_data(E4M3FN)))
    assert (data["max"], data["saturate"], data["tieOverflows"]) == (448.0, 464.0, False)
    assert (data["flush"], data["minSubnormal"]) == (2.0**-10, 2.0**-9)


# -- findings ---------------------------------------------------------------------------------------------------------


def entry(module, order, nan=0):
    return {"module": module, "kind": "output", "name": "", "dtype": "float16", "order": order, "amax": 3e4,
            "headroom_binades": 1.1, "nan": nan, "inf": 0}  # fmt: skip


def test_the_way_leads_from_the_first_suspicious_tensor_to_the_loss(tmp_path):
    rows = [{"step": 0, "module": f"m{i:02}", "order": i, "numel": 4, "nan": int(i >= 3)} for i in range(20)]
    rows.append({"step": 0, "module": "", "root": "", "kind": "loss", "order": 20, "numel": 1, "nan": 1})
    view = opened(tmp_path / "run", rows)
    location = Location(module="m03", kind="output", phase=Phase.FORWARD, rank=0, step=0)
    path = [entry("m02", 2), entry("m03", 3, nan=4)]
    finding = Finding("PD101", "x", Severity.ERROR, 0.9, "`m03` fails", "", location, evidence={"path": path})
    card = cards.card(view, finding)
    states = [(n["label"], n["state"]) for n in card["path"]]
    assert states[:3] == [("m02", "near"), ("m03", "origin"), ("m04", "after")]
    assert [n for n, s in states if s == "gap"] == ["11 more tensors"]
    assert states[-1] == ("loss", "after") and len(states) <= 9


def test_evidence_of_the_wrong_shape_is_left_out(tmp_path):
    view = opened(tmp_path / "run", [{"step": 0}])
    for odd in (3, "x", [1], {"dtype": "float16", "exp_hist": "no"}, {"dtype": 4}, None):
        evidence = {"range": odd, "path": odd, "history": odd, "tensors": odd, "consequences": odd, "detected_at": odd}
        finding = Finding("PD101", "x", Severity.INFO, 1.0, "t", "m", Location(), evidence=evidence)
        card = cards.card(view, finding)
        assert [card[name] for name in ("strip", "history", "shares", "consequences")] == [None, None, [], []]


# -- what was recorded ------------------------------------------------------------------------------------------------


def test_coverage_adds_up(tmp_path):
    tensors = (("a", "float16", 30), ("b", "float32", 10))
    rows = [{"step": s, "module": m, "dtype": d, "numel": n} for s in range(2) for m, d, n in tensors]
    view = opened(tmp_path / "run", rows)
    found = about.coverage(Survey(view))
    assert [tuple(c[n] for n in ("dtype", "tensors", "rows", "elements", "share")) for c in found] == [
        ("float16", "1", "2", "60", "75 %"),
        ("float32", "1", "2", "20", "25 %"),
    ]


def test_what_a_log_cannot_tell(tmp_path):
    steps = [{"step": s, "sampled": s % 2 == 0, "loss": 1.0} for s in range(4)]
    options = {"options": {"include": ["blocks.*"], "redact_names": True}}
    view = opened(tmp_path / "run", [{"step": 0, "scale": 3.0}], steps, info=options, end=False)
    said = " ".join(about.not_recorded(view, Survey(view)))
    for part in ("on 2 of 4 steps", "--include blocks.*", "--redact-names", "No row of: activation gradients",
                 "1 row of a scale that is no power of two", "never closed"):  # fmt: skip
        assert part in said
