"""The loss scale that PD201 prescribes leaves nothing for another rule to report."""

from __future__ import annotations

from pathlib import Path

from precdoctor.diagnosis.claims.finding import Diagnosis
from precdoctor.diagnosis.engine import diagnose
from precdoctor.runlog import open_run
from tests.support.training import FORWARD, Training, normal

#: Unscaled standard deviation of all activation gradients: half of FP16's smallest subnormal.
_SIGMA = 2.0**-25


def diagnosed(path: Path, scale: float) -> Diagnosis:
    training = Training(steps=6, dtype="float16", scale=scale)
    for module, _ in FORWARD:
        training.change(lambda row: row.update(normal(_SIGMA * scale, "float16")), kind="grad_output", module=module)
    return diagnose(open_run(training.write(path).path), select=["PD201", "PD303"])


def test_the_prescribed_scale_lifts_gradients_out_of_the_subnormals(tmp_path: Path) -> None:
    found = diagnosed(tmp_path / "before", 1.0).findings
    [flushed] = [finding for finding in found if finding.code == "PD201"]
    scale = flushed.prescriptions[0].change["loss_scale"]["to"]
    assert 2.0**11 < scale < 2.0**30
    assert diagnosed(tmp_path / "after", scale).findings == ()
