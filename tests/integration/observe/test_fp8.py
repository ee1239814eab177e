"""Casts to float8 have rows: what lay before the cast, the scale in force, and exactly what clipped and flushed."""

from __future__ import annotations

import numpy as np
import pytest

#: OFP8: the largest magnitude that still rounds to the maximum, and the largest that rounds to zero.
FLUSHED = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}


def clipped(values, fmt):
    magnitude = np.abs(values)
    return int((magnitude > 464).sum() if fmt == "float8_e4m3fn" else (magnitude >= 61440).sum())


def operands(zoo, name, **equal):
    return zoo.rows(name, kind="fp8_operand", **equal)


def sites(rows):
    return set(zip(rows["module"], rows["name"], rows["call"], strict=True))


@pytest.fixture(scope="module")
def witnessed(zoo):
    with np.load(zoo.directory / "oracle" / "fp8_delayed.npz") as arrays:
        return dict(arrays)


def test_every_operand_of_delayed_scaling_is_what_the_script_saw(zoo, witnessed):
    rows = operands(zoo, "fp8_delayed", step=2, root="Classifier#0").set_index(["module", "name"])
    seen = {tuple(key.split(" ")): values for key, values in witnessed.items() if not key.endswith("scale")}
    assert set(rows.index) == set(seen) and len(seen) == 6
    for (module, name), values in seen.items():
        row = rows.loc[(module, name)]
        fmt = "float8_e5m2" if name == "grad_output" else "float8_e4m3fn"
        assert (row["dtype"], row["format"], row["phase"], row["call"]) == ("float32", fmt, "train", 0)
        assert row["numel"] == values.size and list(row["shape"]) == list(values.shape)
        assert row["amax"] == np.abs(values).max()
        assert row["scale"] == witnessed[f"{module} {name} scale"]
        assert row["saturated"] == clipped(values, fmt), (module, name)
        assert row["flushed"] == ((values != 0) & (np.abs(values) <= FLUSHED[fmt])).sum(), (module, name)
        assert row["exp_hist"].sum() == (values != 0).sum()
        assert row["block16_hist"] is not None
    assert rows.loc[("up", "input"), "saturated"] > 500  # the data jumped, the scale did not


def test_histories_of_amax_have_rows_as_buffers(zoo):
    rows = zoo.rows("fp8_delayed", kind="buffer", module="up")
    assert {"input_amax_history", "weight_amax_history", "grad_output_amax_history"} == set(rows["name"])


def test_what_saturates_on_one_step_shows_on_that_step_only(zoo):
    rows = operands(zoo, "fp8_delayed", module="up")
    rows = rows[rows["name"] == "input"].set_index("step")
    assert rows.loc[2, "saturated"] > 0 and rows.loc[3, "saturated"] == 0


def test_recomputed_casts_count_once_and_the_last_micro_step_stays(zoo):
    rows = operands(zoo, "fp8_checkpointed", step=2)
    assert sites(rows) == {("blocks.0.quantise", "input", 0), ("blocks.1.quantise", "input", 0)}
    assert set(rows["phase"]) == {"train"} and set(rows["micro_step"]) == {1}
    assert (rows["numel"] == 32 * 16).all()
    assert rows["amax"].to_numpy() == pytest.approx(448.0, rel=1e-6)
    assert (rows["saturated"] == 0).all()


def test_a_scaled_product_tells_scales_that_nothing_else_does(zoo):
    rows = operands(zoo, "fp8_scaled_mm", step=1).set_index("name")
    assert rows.loc["cast.0", "scale"] == 4.0
    assert rows.loc["cast.1", "scale"] == 64.0


def test_rank_json_tells_how_scaled_products_add_up(zoo):
    (product,) = zoo.run("fp8_scaled_mm").ranks[0].facts["fp8_products"]
    assert product == {
        "root": "Sequential#0", "module": "0", "backward": False, "operands": ["cast.0", "cast.1"],
        "dtypes": ["float8_e4m3fn", "float8_e4m3fn"], "fast_accum": True, "terms": 16,
    }  # fmt: skip
    assert zoo.run("fp8_delayed").ranks[0].facts["fp8_products"] == []


def test_products_of_the_backward_pass_are_told_apart_by_their_operands(zoo):
    products = zoo.run("fp8_three_products").ranks[0].facts["fp8_products"]
    assert {p["module"] for p in products} == {"1"} and {p["root"] for p in products} == {"Sequential#0"}
    told = {tuple(p["operands"]): (p["backward"], p["fast_accum"], p["terms"], p["dtypes"][0]) for p in products}
    assert told == {
        ("input", "weight"): (False, False, 48, "float8_e4m3fn"),
        ("grad_output", "weight.1"): (True, False, 16, "float8_e5m2"),
        ("grad_output.1", "input.1"): (True, True, 32, "float8_e5m2"),
    }


def test_compiled_functions_inside_stay_compiled_and_eager_casts_are_seen(zoo):
    rows = operands(zoo, "fp8_compiled", step=2)
    assert set(rows["module"]) == {"0"}  # "2" is compiled as a whole
    assert (rows[rows["format"] == "float8_e5m2"]["scale"] == 2.0).all()


def test_a_float8_buffer_tells_of_casts_that_nothing_else_would(zoo):
    rows = operands(zoo, "fp8_cached")
    assert set(rows["step"]) == {1, 2}  # the buffer is met as the first step ends
    assert sites(rows) == {("", "linear.weight", 0)}
    assert (rows["scale"] == 4.0).all() and (rows["format"] == "float8_e5m2").all()


def test_odd_casts(zoo):
    rows = operands(zoo, "fp8_oddities", step=2, root="Oddities#0", call=1).set_index("name")
    into_buffer, by_row, bare, hidden = (rows.loc[name] for name in ("input", "input.1", "input.2", "input.3"))
    assert into_buffer["scale"] == 8.0
    assert np.isnan(by_row["scale"]) and by_row["saturated"] == 0
    assert (bare["scale"], bare["format"]) == (1.0, "float8_e5m2")
    assert hidden["scale"] == 1000.0 and hidden["amax"] == 448.0
    assert hidden.isna()["saturated"]  # a minimum is no clamp: how many it cut cannot be told from the cast


def test_what_a_call_cast_before_it_failed_has_rows(zoo):
    rows = operands(zoo, "fp8_oddities", step=2, root="Oddities#0", call=0)
    assert sites(rows) == {("", "input", 0), ("", "input.1", 0), ("", "input.2", 0)}


def test_casts_outside_of_modules(zoo):
    rows = operands(zoo, "fp8_oddities", root="")
    assert (rows.groupby("step").size() == 1).all() and set(rows["name"]) == {"cast.0"}
    assert rows["scale"].isna().all()  # nobody saw what multiplied it
    assert (rows["saturated"] == 0).all()


def test_exporting_weights_to_float8_after_training_is_no_step(zoo):
    assert zoo.steps("fp8_oddities")["complete"].all()
    assert operands(zoo, "fp8_oddities")["step"].max() == zoo.steps("fp8_oddities").index.max()


def test_runs_without_float8_have_no_such_rows(zoo):
    for name in zoo.plain:
        if not name.startswith("fp8_"):
            assert operands(zoo, name).empty, name


def test_scales_of_transformer_engine_are_read_from_their_attributes(zoo):
    rows = zoo.rows("engines", step=2, kind="buffer", module="0").set_index("name")
    operands_ = {"input", "weight", "output", "grad_output", "grad_input"}
    assert set(rows.index) == {f"{operand}.{held}" for operand in operands_ for held in ("scale", "amax_history")}
    history, scale = rows.loc["input.amax_history"], rows.loc["input.scale"]
    assert history["numel"] == 4 and scale["numel"] == 1
    assert scale["amax"] == pytest.approx(448.0 / history["amax"], rel=1e-6)
