"""MS-AMP, which needs a GPU: stand-ins after the source of release 0.4.0. Its parameters and states are no tensors."""

from __future__ import annotations

import numpy as np
import pytest

from precdoctor.diagnosis.engine import diagnose
from tests.integration.observe.conftest import Zoo, train


@pytest.fixture(scope="module")
def msamp(tmp_path_factory):
    directory = tmp_path_factory.mktemp("msamp")
    return Zoo(directory, *train(directory, "msamp_o2", "msamp_lost_state"))


@pytest.mark.parametrize("name", ["msamp_o2", "msamp_lost_state"])
def test_no_bit_of_training_changes(msamp, name):
    assert msamp.recorded[name]["digest"] == msamp.plain[name]["digest"] != "failed"


def test_a_healthy_run_has_no_findings(msamp):
    assert [f.code for f in diagnose(msamp.run("msamp_o2")).findings] == []


def test_a_lost_second_moment_is_found_and_told_as_what_it_is(msamp):
    (finding,) = diagnose(msamp.run("msamp_lost_state")).findings
    assert finding.code == "PD506" and finding.evidence["dtype"] == "float8_e4m3fn"
    assert finding.location.module == "0" and finding.evidence["zero_share"] > 0.5
    assert "float8_e4m3fn with a scale per block" in finding.message
    # by how much a format rounds unscaled gradients is not said of scaled ones
    assert finding.evidence["smallest_gradient_kept"] is None


def test_weights_gradients_and_states_are_recorded_dequantised(msamp):
    rows = msamp.rows("msamp_o2", step=8, module="0").set_index(["kind", "name"])
    formats = {
        ("weight", "weight"): "float16",
        ("weight_grad_step", "weight"): "float8_e4m3fn",
        ("opt_state", "weight.exp_avg"): "float8_e4m3fn",
        ("opt_state", "weight.exp_avg_sq"): "float16",
    }
    for key, stored in formats.items():
        row = rows.loc[key]
        assert (row["format"], row["dtype"], row["numel"]) == (stored, "float32", 64 * 128)
    scales = rows.loc["block_scale"]
    assert set(scales.index) >= {"weight", "weight.grad", "weight.exp_avg", "weight.exp_avg_sq"}
    assert (scales["numel"] == 1).all()
    largest = {"float16": 65504.0, "float8_e4m3fn": 448.0}
    for (kind, name), stored in formats.items():
        scaled = (
            rows.loc[(kind, name), "amax"] * scales.loc[f"{name}.grad" if kind == "weight_grad_step" else name, "amax"]
        )
        assert largest[stored] / 2.1 < scaled <= largest[stored]


def test_casts_have_the_scale_in_force(msamp):
    rows = msamp.rows("msamp_o2", kind="fp8_operand", step=5).set_index(["module", "name"])
    assert rows.loc[("0", "input"), "format"] == rows.loc[("0", "grad_output.1"), "format"] == "float8_e4m3fn"
    assert rows.loc[("0", "grad_output"), "format"] == "float8_e5m2"
    assert np.log2(rows["scale"]).apply(float.is_integer).all()
    assert (rows["saturated"] == 0).all()
