"""Weights that were replaced after the optimizer was made (PD510), where the log holds no gradient of any weight."""

from __future__ import annotations

from pathlib import Path

from precdoctor.diagnosis import diagnose
from tests.rules.PD510.samples import ZEROS, a_head_replaced_behind_the_optimizers_back


def test_no_row_that_could_count_is_no_error(tmp_path: Path):
    run = a_head_replaced_behind_the_optimizers_back()
    run.change(lambda r: r.update(ZEROS, zero=r["numel"]), kind="weight_grad")
    (outcome,) = [r for r in diagnose(run.write(tmp_path / "run")).rules if r.code == "PD510"]
    assert outcome.status.value == "not-applicable"
