"""torchao, run for real: operands, block scales and quantised states have rows, and no bit of training changes."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import numpy as np
import pytest
import torch

from precdoctor.diagnosis.engine import diagnose
from precdoctor.numerics.blocks import BLOCK_FORMATS, ScaleRule
from tests.integration.observe.conftest import Zoo, train
from tests.support.references import cast_blocks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed (requirements/dev.txt)"
)

#: The release whose classes and functions the recorder follows.
RELEASE = "0.18"
HEALTHY = (
    *("torchao_float8_tensorwise", "torchao_float8_rowwise", "torchao_float8_scaled_mm"),
    *("torchao_mxfp8", "torchao_mxfp4", "torchao_nvfp4"),
    *("torchao_adamw8bit", "torchao_adamw4bit", "torchao_adamwfp8", "torchao_qat_int4"),
)
#: What is planted, or what torchao 0.18 does itself, and the code of the finding.
FAULTY = {
    "torchao_float8_scale_too_large": "PD401",
    "torchao_float8_rowwise_scale_too_small": "PD402",
    "torchao_adamwfp8_outliers": "PD506",
    "torchao_qat_float8": "PD402",
}


@pytest.fixture(scope="module")
def ao(tmp_path_factory):
    directory = tmp_path_factory.mktemp("torchao")
    return Zoo(directory, *train(directory, *HEALTHY, *FAULTY))


def test_the_release_is_the_one_that_is_followed():
    assert importlib.metadata.version("torchao").startswith(f"{RELEASE}."), "read its classes again, then raise RELEASE"


@pytest.mark.parametrize(("fmt", "element"), [("MXFP8_E4M3", "float8_e4m3fn"), ("MXFP4", "float4_e2m1fn_x2")])
@pytest.mark.parametrize(("rule", "mode"), [("floor", "floor"), ("up", "rceil")])
def test_block_casts_are_those_of_the_library(fmt, element, rule, mode):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 64)[:, None]
    theirs = MXTensor.to_mx(x, getattr(torch, element), 32, ScaleCalculationMode(mode)).dequantize(torch.float32)
    ours = cast_blocks(x.double().numpy(), BLOCK_FORMATS[fmt], rule=ScaleRule(rule)).values
    assert (theirs.double().numpy() == ours).all()


def test_casts_to_nvfp4_are_those_of_the_library_but_in_tiny_blocks():
    """torchao's block scales end at the smallest normal number of E4M3, ours at its smallest subnormal."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 64)[:, None]
    scale = per_tensor_amax_to_scale(x.abs().max())
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)
    ours = cast_blocks(x.double().numpy(), BLOCK_FORMATS["NVFP4"]).values
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-6)


@pytest.mark.parametrize("name", [*HEALTHY, *FAULTY])
def test_no_bit_of_training_changes(ao, name):
    assert ao.recorded[name]["digest"] == ao.plain[name]["digest"] != "failed"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_findings(ao, name):
    assert [f.code for f in diagnose(ao.run(name)).findings] == []


@pytest.mark.parametrize("name", FAULTY)
def test_the_fault_is_the_first_finding(ao, name):
    assert diagnose(ao.run(name)).findings[0].code == FAULTY[name]


def test_operands_scaled_as_a_whole_have_their_scale(ao):
    for name in ("torchao_float8_tensorwise", "torchao_float8_scaled_mm"):
        rows = ao.rows(name, kind="fp8_operand", step=5)
        assert set(rows["name"]) == {"input", "weight", "grad_output", "weight.1", "input.1", "grad_output.1"}
        assert set(rows["module"]) == {"0", "3"}
        assert (rows["amax"] / rows["scale"] > 0).all()
        limit = np.where(rows["format"] == "float8_e5m2", 57344.0, 448.0)
        assert rows["amax"].to_numpy() == pytest.approx(limit, rel=1e-6)
        assert ao.rows(name, kind="block_scale").empty


@pytest.mark.parametrize(("name", "blocks"), [("torchao_float8_rowwise", 32), ("torchao_mxfp8", 32 * 64 // 32)])
def test_scales_by_row_or_block_have_a_row_of_their_own(ao, name, blocks):
    operands = ao.rows(name, kind="fp8_operand", step=5).set_index(["module", "name"])
    scales = ao.rows(name, kind="block_scale", step=5).set_index(["module", "name"])
    assert set(operands.index) == set(scales.index) and len(operands) == 12
    assert operands["scale"].isna().all()
    assert (operands["saturated"] == 0).all()
    assert scales.loc[("0", "input"), "numel"] == blocks
    # powers of two, as these recipes have them: sums of two such are exact, and each lies at the top of its bin
    assert np.log2(scales["amax"]).apply(float.is_integer).all()
    assert np.log2(scales["amin_nonzero"]).apply(float.is_integer).all()


@pytest.mark.parametrize(("name", "block"), [("torchao_mxfp4", 32), ("torchao_nvfp4", 16)])
def test_casts_to_fp4_have_rows_though_no_op_casts(ao, name, block):
    rows = ao.rows(name, kind="subbyte_operand", step=5).set_index(["module", "name"])
    assert set(rows.index) == {(m, n) for m in ("0", "3") for n in ("input", "weight")}
    assert set(rows["format"]) == {"float4_e2m1fn"} and set(rows["dtype"]) == {"float32"}
    # NVFP4 rounds a block's scale to E4M3: an element may lie up to a sixteenth above the largest FP4 number
    assert (rows["amax"] <= 6.0 * (1.0625 if block == 16 else 1.0)).all()
    assert (rows["flushed"] > 0).all() and (rows["flushed"] < 0.2 * rows["numel"]).all()
    scales = ao.rows(name, kind="block_scale", step=5).set_index(["module", "name"])
    assert (scales["numel"] * block == rows["numel"]).all()


@pytest.mark.parametrize(
    ("name", "stored", "block"),
    [
        ("torchao_adamw8bit", "codebook8", 256),
        ("torchao_adamw4bit", "codebook4", 128),
        ("torchao_adamwfp8", "float8_e4m3fn", 256),
    ],
)
def test_quantised_states_are_recorded_dequantised(ao, name, stored, block):
    states = ao.rows(name, kind="opt_state", step=8).set_index(["module", "name"])
    quantised = states[states["format"].notna()]
    assert set(quantised.index) == {(m, f"weight.{k}") for m in ("0", "3") for k in ("exp_avg", "exp_avg_sq")}
    assert set(quantised["format"]) == {stored} and set(quantised["dtype"]) == {"float32"}
    scales = ao.rows(name, kind="block_scale", step=8).set_index(["module", "name"])
    assert (scales["numel"] * block == quantised["numel"]).all()
    # small parameters are not quantised, and larger ones move as far
    wide = states.loc[("5", "weight.exp_avg_sq")]
    second = quantised.loc[("3", "weight.exp_avg_sq")]
    assert 0.01 < (second["sum"] / second["numel"]) / (wide["sum"] / wide["numel"]) < 100.0


def test_a_dequantised_second_moment_is_near_that_of_plain_adamw(ao):
    """It sums up the squared gradients of nine steps; rounding them to 8 bits by block costs two percent at most."""
    given = ao.rows("torchao_adamw8bit", kind="weight_grad_step", module="0").set_index(["name", "step"])["sum_sq"]
    decayed = sum(0.001 * 0.999 ** (8 - step) * given["weight", step] for step in range(9))
    second = ao.rows("torchao_adamw8bit", kind="opt_state", module="0", step=8).set_index("name")
    assert second.loc["weight.exp_avg_sq", "sum"] == pytest.approx(decayed, rel=0.02)


def test_fake_quantisers_of_integers_tell_their_scales(ao):
    scales = ao.rows("torchao_qat_int4", kind="block_scale", step=5).set_index("module")
    weights = scales.loc["0.weight_fake_quantizer"]
    assert weights["numel"] == 128 * 64 // 32
    assert scales.loc["0.activation_fake_quantizer", "numel"] == 32  # one per token
