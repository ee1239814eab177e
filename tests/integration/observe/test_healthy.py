"""Healthy runs, full of what a careless rule would take for a defect, give no finding above info."""

from __future__ import annotations

import pytest

from precdoctor.diagnosis import diagnose

#: -inf masks (gpt), fresh scalers, ReLU and dropout zeros, frozen layers, unused rows, padding, and so on.
HEALTHY = [
    "gpt", "gpt_checkpoint", "gpt_checkpoint_reentrant", "gpt_accumulate", "gpt_bf16_autocast", "gpt_compiled",
    "fresh_scaler", "dead_units", "distillation", "warm_up", "sparse_rows", "recurrent", "gan", "gradient_penalty",
    "zero_initialised", "padded", "late_adapter", "cnn", "encoder", "odd_outputs", "evaluations", "submodules",
    "lbfgs", "closure_adam", "cleared_in_step", "inner_loop", "hand_scaled", "weighted_loss", "caught_exception",
    "functional_loss",
    "fp8_checkpointed", "fp8_scaled_mm", "fp8_three_products", "fp8_compiled", "spectral",
]  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_no_finding_above_info(zoo, name):
    diagnosis = diagnose(zoo.run(name))
    assert [f"{f.code} {f.severity.value}: {f.title}" for f in diagnosis.findings if f.severity.value != "info"] == []
    assert {o.code: o.reason for o in diagnosis.rules if o.status.value in ("failed", "indeterminate")} == {}


def test_a_sick_one_is_told_from_them(zoo):
    assert "PD501" in {finding.code for finding in diagnose(zoo.run("pure_bf16")).findings}
