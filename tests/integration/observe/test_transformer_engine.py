"""Quantisers of Transformer Engine, which needs a GPU: stand-ins after the source of release 2.18.

``tests/gpu/test_transformer_engine.py`` runs the library itself where it is installed.
"""

from __future__ import annotations

import numpy as np
import pytest

from precdoctor.diagnosis.engine import describe_recorder, diagnose
from precdoctor.diagnosis.survey.view import RunView
from tests.integration.observe.conftest import Zoo, train

HEALTHY = (
    *("te_current", "te_custom", "te_delayed_ops", "te_blocks"),
    *("te_mxfp8", "te_mxfp8_swizzled", "te_nvfp4", "te_fused"),
)
FAULTY = {"te_delayed_ops_stale": "PD404", "te_blocks_saturated": "PD401"}
#: Each linear layer has three operands, cast once a step.
OPERANDS = {(module, name) for module in ("0", "3") for name in ("input", "weight", "grad_output")}


@pytest.fixture(scope="module")
def te(tmp_path_factory):
    directory = tmp_path_factory.mktemp("te")
    return Zoo(directory, *train(directory, *HEALTHY, *FAULTY))


@pytest.mark.parametrize("name", [*HEALTHY, *FAULTY])
def test_no_bit_of_training_changes(te, name):
    assert te.recorded[name]["digest"] == te.plain[name]["digest"] != "failed"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_findings(te, name):
    assert [f.code for f in diagnose(te.run(name)).findings] == []


@pytest.mark.parametrize("name", FAULTY)
def test_the_fault_is_the_first_finding(te, name):
    assert diagnose(te.run(name)).findings[0].code == FAULTY[name]


@pytest.mark.parametrize("name", ["te_current", "te_custom", "te_delayed_ops"])
def test_one_scale_for_a_tensor_is_in_its_row(te, name):
    rows = te.rows(name, kind="fp8_operand", step=5).set_index(["module", "name"])
    assert set(rows.index) == OPERANDS
    assert set(rows.loc[rows.index.get_level_values(1) == "grad_output", "format"]) == {"float8_e5m2"}
    weights = te.rows(name, kind="weight", step=5).set_index(["module", "name"])["amax"]
    for module in ("0", "3"):
        row = rows.loc[(module, "weight")]
        assert row["amax"] / row["scale"] == pytest.approx(weights[module, "weight"], rel=1e-6)
    assert te.rows(name, kind="block_scale").empty


def test_operations_tell_their_scales_and_histories(te):
    names = {
        f"{operand}.{held}" for operand in ("input", "weight", "grad_output") for held in ("scale", "amax_history")
    }
    assert set(te.rows("te_delayed_ops", kind="buffer", module="0", step=5)["name"]) == names


@pytest.mark.parametrize(
    ("name", "kind", "block"),
    [("te_mxfp8", "fp8_operand", 32), ("te_mxfp8_swizzled", "fp8_operand", 32), ("te_nvfp4", "subbyte_operand", 16)],
)
def test_scales_by_block_without_their_padding(te, name, kind, block):
    rows = te.rows(name, kind=kind, step=5).set_index(["module", "name"])
    scales = te.rows(name, kind="block_scale", step=5).set_index(["module", "name"])
    assert set(rows.index) == set(scales.index) == OPERANDS
    assert (scales["numel"] * block == rows["numel"]).all()
    largest = 448.0 if block == 32 else 6.0
    # every block is filled: to the last binade of E4M3; in NVFP4 up to the rounding of the block's own scale
    assert (rows["amax"] > largest / 2).all() and (rows["amax"] <= largest * 1.0625).all()
    assert (rows["saturated"] == 0).all()


def test_the_order_in_which_scales_are_stored_makes_no_difference(te):
    columns = ["module", "name", "kind", "amax", "amin_nonzero", "sum", "sum_sq", "flushed", "saturated"]
    row_major, swizzled = (
        te.rows(name)[te.rows(name)["kind"].isin(("fp8_operand", "block_scale"))][columns].reset_index(drop=True)
        for name in ("te_mxfp8", "te_mxfp8_swizzled")
    )
    assert row_major.equals(swizzled)


def test_scales_of_tiles_and_of_parts_of_rows(te):
    scales = te.rows("te_blocks", kind="block_scale", step=5).set_index(["module", "name"])
    assert scales.loc[("0", "weight"), "numel"] == 2  # 256 x 128 elements in tiles of 128 x 128
    assert scales.loc[("0", "grad_output"), "numel"] == 128 * 2  # 128 x 256 elements, 128 in a row
    assert np.log2(scales["amax"]).apply(float.is_integer).all()


def test_what_only_kernels_see_is_said_in_one_line(te):
    assert describe_recorder(RunView(te.run("te_fused")))["unseen"] == [
        "casts inside kernels of Transformer Engine; there are no rows of inputs (FusedLinear), gradients (FusedLinear)"
    ]
    assert "unseen" not in describe_recorder(RunView(te.run("te_delayed_ops")))
